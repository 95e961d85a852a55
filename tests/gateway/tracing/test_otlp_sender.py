"""Traces on their way to a backend that fails, hangs, lies, or wants to know who sends them."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from gateway.metrics.fast_counters import FastCounter
from gateway.settings.tracing_settings import TracingSettings
from gateway.tracing import backend, otlp_sender
from gateway.tracing.otel_variables import OtelVariables
from gateway.tracing.otlp_sender import OtlpSender
from gateway.tracing.tracing import Tracing
from tests.certificates import self_signed
from tests.otlp import Receiver
from tests.polling import eventually
from tests.programs import needs
from tests.threaded_server import in_thread

SOON = OtelVariables(delay_s=0.01)
REGISTRY = CollectorRegistry()
SENT, LOST = (FastCounter(name, "Traces.", (), REGISTRY) for name in ("sent", "lost"))


@pytest.fixture(autouse=True)
def tries_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_sender, "_AGAIN_S", 0.01)


@pytest.fixture
def received() -> Iterator[Receiver]:
    with in_thread(Receiver()) as server:
        yield server


def sent() -> float:
    return REGISTRY.get_sample_value("sent_total") or 0


def lost() -> float:
    return REGISTRY.get_sample_value("lost_total") or 0


def written(name: str) -> bytes:
    """The message of a trace. Here, a trace is its only span's name."""
    message = ExportTraceServiceRequest()
    message.resource_spans.add().scope_spans.add().spans.add(name=name)
    return message.SerializeToString()


@asynccontextmanager
async def sending(
    url: str, variables: OtelVariables = SOON, write: Callable[[str], bytes] = written
) -> AsyncIterator[OtlpSender[str]]:
    sender = OtlpSender(url, variables, write, SENT, LOST)
    sender.start()
    try:
        yield sender
    finally:
        await sender.close()


async def test_traces_that_find_no_room_are_lost_and_the_others_come_when_the_backend_is_back(
    received: Receiver,
) -> None:
    before, taken, received.status = lost(), sent(), 503
    with capture_logs() as told:
        async with sending(received.url, replace(SOON, most_waiting=3, batch=2)) as sender:
            for number in range(5):
                sender.put(f"t{number}")
            await eventually(lambda: received.refused > 1)
            received.status = 200
            await eventually(lambda: len(received.spans) == 3)
    assert [span["name"] for span in received.spans] == ["t0", "t1", "t2"]
    assert (lost() - before, sent() - taken) == (2, 3)
    no_room, again = ((line["event"], line.get("reason"), line["lost"]) for line in told)
    assert no_room == ("traces are not sent", "no room in the queue", 1)
    assert again == ("traces are sent again", None, 2)


async def test_traces_that_are_sent_again_are_written_once(received: Receiver) -> None:
    names, received.status = list[str](), 503

    def write(name: str) -> bytes:
        names.append(name)
        return written(name)

    async with sending(received.url, write=write) as sender:
        sender.put("one")
        await eventually(lambda: received.refused > 2)
        received.status = 200
        await eventually(lambda: received.spans)
    assert names == ["one"]


async def test_a_batch_that_the_backend_refuses_for_good_is_lost_and_holds_up_no_other(received: Receiver) -> None:
    before, received.status = lost(), 400
    async with sending(received.url) as sender:
        sender.put("refused")
        await eventually(lambda: received.refused == 1)
        received.status = 200
        sender.put("taken")
        await eventually(lambda: received.spans)
    assert [span["name"] for span in received.spans] == ["taken"]
    assert lost() - before == 1


async def test_a_trace_that_cannot_be_written_is_lost_alone(received: Receiver) -> None:
    before, record = lost(), {"model": "m", "method": "POST", "path": "/v1/x", "status": 200}
    tracing = Tracing(TracingSettings(endpoint=received.url, sample_ratio=1), SOON, "gw0", SENT, LOST)
    assert tracing.sender is not None
    tracing.sender.start()
    with capture_logs() as told:
        for tokens in (1, 2**64, 2):  # an engine may say so
            tracing.begin({}).end("chat", {**record, "prompt_tokens": tokens})
        await tracing.sender.close()
    assert [span["gen_ai.usage.input_tokens"] for span in received.spans] == [1, 2]
    assert lost() - before == 1
    assert [(line["event"], line["traces"], line["reason"]) for line in told] == [("traces lost", 1, "OverflowError")]


async def test_a_backend_that_hangs_holds_up_no_other_batch_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "SENDS_WITHIN_S", 0.1)
    monkeypatch.setattr(otlp_sender, "_CLOSES_WITHIN_S", 0.1)
    before, asked = lost(), list[bytes]()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.read())  # until it hangs up
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with sending(f"http://127.0.0.1:{port}/v1/traces") as sender:
            sender.put("first")
            await eventually(lambda: len(asked) == 1)
            sender.put("second")
            await eventually(lambda: len(asked) == 2)
            monkeypatch.setattr(backend, "SENDS_WITHIN_S", 3600)
            sender.put("third")
        await eventually(lambda: len(asked) == 3)
    assert all(name in body for name, body in zip((b"first", b"second", b"third"), asked, strict=True))
    assert lost() - before == 3


async def test_a_batch_that_breaks_the_connection_holds_up_no_other(received: Receiver) -> None:
    before, port = lost(), received.server_port
    first = asyncio.Event()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if not first.is_set():
            first.set()
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection("127.0.0.1", port)
        back.write(head + await reader.read(65_536))
        writer.write(await there.read())
        for each in (back, writer):
            each.close()

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    async with server, sending(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/traces") as sender:
        sender.put("bad")
        await first.wait()
        sender.put("good")
        await eventually(lambda: received.spans)
    assert [span["name"] for span in received.spans] == ["good"]
    assert lost() - before == 1


def test_what_sending_imports_is_imported_at_the_start(received: Receiver) -> None:
    code = """if True:
        import sys, uvloop, gateway.server
        from prometheus_client import CollectorRegistry
        from gateway.metrics.fast_counters import FastCounter
        from gateway.tracing.otel_variables import OtelVariables
        from gateway.tracing.otlp_sender import OtlpSender

        async def main():
            counter = FastCounter("traces", "Traces.", (), CollectorRegistry())
            sender = OtlpSender(sys.argv[1], OtelVariables(has_gzip=True), bytes.fromhex, counter, counter)
            sender.start()
            "localhost".encode("idna")  # a gateway's first look at its replicas imports that
            before = set(sys.modules)
            sender.put(sys.argv[2])
            await sender.close()
            print(*sys.modules.keys() - before)

        uvloop.run(main())
    """
    url = received.url.replace("127.0.0.1", "localhost")
    done = subprocess.run(
        [sys.executable, "-c", code, url, written("one").hex()], capture_output=True, text=True, check=True
    )
    assert [span["name"] for span in received.spans] == ["one"]
    assert done.stdout.split() == []


async def test_an_answer_without_an_end_is_not_read_to_its_end() -> None:
    is_left, written = asyncio.Event(), list[int]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(b"x" * 65_536)
                written.append(65_536)
                await writer.drain()
        writer.close()
        is_left.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with capture_logs() as told:
            async with sending(f"http://127.0.0.1:{port}/v1/traces") as sender:
                sender.put("taken")
                await is_left.wait()
    assert told == []
    assert sum(written) < 20_000_000, "it is left when some buffers are full"


async def test_what_nobody_has_thought_of_loses_a_batch_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> int:
        raise RuntimeError("nobody has thought of this")

    monkeypatch.setattr(backend, "post", fail)
    before = lost()
    with capture_logs() as told:
        async with sending("http://127.0.0.1:9/v1/traces") as sender:
            sender.put("one")
            await eventually(lambda: lost() - before == 1)
    assert [line["reason"] for line in told] == ["RuntimeError"]


async def test_what_the_environment_says_goes_with_the_traces(received: Receiver) -> None:
    env = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"}
    async with sending(received.url, OtelVariables.of(env)) as sender:
        sender.put("compressed")
    assert [span["name"] for span in received.spans] == ["compressed"]
    assert received.keys == ["Bearer x"]


@needs("openssl")
async def test_backend_and_gateway_show_certificates_and_new_ones_are_read(tmp_path: Path) -> None:
    backends, _ = self_signed(tmp_path, "backend", "127.0.0.1")
    known, its_key = self_signed(tmp_path, "known", "127.0.0.1")
    certificate, key = self_signed(tmp_path, "unknown", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(backends, backends.with_suffix(".key"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(known)
    receiver = Receiver()
    receiver.socket = context.wrap_socket(receiver.socket, server_side=True, do_handshake_on_connect=False)
    variables = replace(SOON, authorities=str(backends), certificate=str(certificate), key=str(key))
    with in_thread(receiver), capture_logs() as told:
        async with sending(receiver.url, variables) as sender:
            sender.put("of an unknown one")
            await eventually(lambda: told)
            assert receiver.spans == []
            certificate.write_bytes(known.read_bytes())
            key.write_bytes(its_key.read_bytes())

            def is_taken() -> bool:
                sender.put("encrypted")
                return bool(receiver.spans)

            await eventually(is_taken)
    assert {span["name"] for span in receiver.spans} == {"encrypted"}
