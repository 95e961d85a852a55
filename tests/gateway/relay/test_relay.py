"""A replica's streams as its client receives them. The test writes every byte of the replica's stream."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import orjson
import pytest

from gateway.relay import events
from gateway.routing.ticket import Ticket
from tests.gateway.scripted import CHAT, Relayed, chunk, head, whole
from tests.polling import eventually

FIRST = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
EVENTS = FIRST + b"data: [DONE]\n\n"
STREAM_HEADERS = ("content-type: text/event-stream", "transfer-encoding: chunked")
MIB = 2**20


async def test_streams_say_that_no_proxy_may_collect_them(relayed: Relayed) -> None:
    relayed.replica.says(head(*STREAM_HEADERS), chunk(EVENTS), chunk(b""))
    headers = (await relayed.stream()).headers
    assert (headers.get_list("x-accel-buffering"), headers.get_list("cache-control")) == (["no"], ["no-cache"])


@pytest.mark.parametrize(("path", "is_computed"), [(CHAT, True), ("/tokenize", False)])
async def test_only_on_paths_that_compute_prompts_does_a_stream_say_that_the_prompt_is_computed(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch, path: str, is_computed: bool
) -> None:
    told: list[Ticket] = []
    monkeypatch.setattr(Ticket, "computed", lambda ticket: told.append(ticket))
    relayed.replica.says(head(*STREAM_HEADERS), chunk(EVENTS), chunk(b""))
    assert (await relayed.stream(path)).status_code == 200
    assert bool(told) is is_computed


async def test_what_a_replica_says_of_caching_stays(relayed: Relayed) -> None:
    relayed.replica.says(head(*STREAM_HEADERS, "Cache-Control: no-store"), chunk(EVENTS), chunk(b""))
    headers = (await relayed.stream()).headers
    assert (headers.get_list("x-accel-buffering"), headers.get_list("cache-control")) == (["no"], ["no-store"])


def error_code(text: str) -> str:
    """The error code in a stream's last event."""
    return str(orjson.loads(text.rstrip().rsplit("data: ", 1)[1])["error"]["code"])


async def test_an_event_without_an_end_is_given_up(relayed: Relayed) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(head(*STREAM_HEADERS) + chunk(FIRST + b"data: "))
        while True:
            writer.write(chunk(b"{}" * 2**15))
            await writer.drain()

    relayed.replica.answer = endless
    answer = await relayed.stream()
    assert error_code(answer.text) == "stream_broken"
    assert "event_too_large" in answer.text
    assert len(answer.content) < 1000, "nothing of it reaches the client"
    await asyncio.wait_for(relayed.replica.hung_up.wait(), 30)
    assert relayed.gateway.admission.held_bytes.taken == 0
    assert "kvgate_broken_streams_total 1.0" in relayed.gateway.metrics.exposition().decode()


@pytest.mark.parametrize("relayed", [{"timeouts": {"idle_s": 0.1}}], indirect=True)
async def test_a_stream_whose_replica_falls_silent_ends_with_an_error_and_its_request_is_aborted(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    rechecked: list[str] = []
    monkeypatch.setattr(relayed.gateway.fleet, "recheck", rechecked.append)
    relayed.replica.says(head(*STREAM_HEADERS), chunk(FIRST), asyncio.Event())
    answer = await relayed.stream()
    assert answer.content.startswith(FIRST)
    assert (error_code(answer.text), "(idle)" in answer.text) == ("stream_broken", True)
    assert rechecked == ["r0"]
    assert "kvgate_broken_streams_total 1.0" in relayed.gateway.metrics.exposition().decode()
    assert not relayed.gateway.upstream._origins[relayed.replica.url]._open, "its request is aborted"


async def test_a_large_event_is_counted_while_it_is_gathered(relayed: Relayed) -> None:
    event = b'data: {"choices":[{"delta":{"content":"' + b"x" * MIB + b'"}}]}\n\n'
    go_on = asyncio.Event()
    relayed.replica.says(head(*STREAM_HEADERS) + chunk(event[:-10]), go_on, chunk(event[-10:] + EVENTS) + chunk(b""))
    asked = asyncio.ensure_future(relayed.stream())
    await eventually(lambda: relayed.gateway.admission.held_bytes.taken >= MIB)
    go_on.set()
    assert (await asked).content == event + EVENTS
    assert relayed.gateway.admission.held_bytes.taken == 0


@pytest.mark.parametrize("relayed", [{"limits": {"max_buffered_bytes": MIB}}], indirect=True)
async def test_where_there_is_no_room_for_a_large_event_its_stream_ends(relayed: Relayed) -> None:
    event = b'data: {"choices":[{"delta":{"content":"' + b"x" * 2 * MIB + b'"}}]}\n\n'
    relayed.replica.says(head(*STREAM_HEADERS), chunk(FIRST), chunk(event + EVENTS) + chunk(b""))
    answer = await relayed.stream()
    assert (error_code(answer.text), "no_room" in answer.text) == ("stream_broken", True)
    assert relayed.gateway.admission.held_bytes.taken == 0


async def test_of_a_streams_first_bytes_little_is_parsed(relayed: Relayed, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []

    def noted(data: bytes) -> object:
        parsed.append(len(data))
        return orjson.loads(data)

    monkeypatch.setattr(events, "orjson", SimpleNamespace(**{**vars(orjson), "loads": noted}))
    event = b'data: {"error":[' + b"{}," * 2**17 + b"{}]}\n\n"
    relayed.replica.says(head(*STREAM_HEADERS) + chunk(event + EVENTS) + chunk(b""))
    assert (await relayed.stream()).content == event + EVENTS
    assert max(parsed, default=0) <= 2**14


@pytest.mark.parametrize("count", [b"true", b"-5", b"9223372036854775808", b"1e30", b"9" * 5000])
async def test_a_replica_that_tells_impossible_counts_of_tokens_changes_no_figure(
    relayed: Relayed, count: bytes
) -> None:
    relayed.replica.says(whole(b'{"usage":{"prompt_tokens":%b,"completion_tokens":%b}}' % (count, count)))
    assert (await relayed.ask()).status_code == 200
    assert 'kvgate_prompt_tokens_total{replica="r0"}' not in relayed.gateway.metrics.exposition().decode()
