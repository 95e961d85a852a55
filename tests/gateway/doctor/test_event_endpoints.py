"""Which endpoints of KV events may be open to other hosts, and whether they are: on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from gateway.doctor import event_endpoints
from gateway.doctor.event_endpoints import open_ones, target_of
from gateway.doctor.evidence import Unknown
from tests.programs import needs

THIS_MACHINE = "http://127.0.0.1:8000"
HERE = event_endpoints.outward_address()
on_a_network = needs("a network")


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("tcp://*:5557", ("gpu0", 5557)),
        ("tcp://0.0.0.0:5557", ("gpu0", 5557)),
        ("tcp://[::]:5557", ("gpu0", 5557)),
        ("tcp://10.0.0.5:5557", ("10.0.0.5", 5557)),
        ("tcp://gpu0.cluster:5557", ("gpu0.cluster", 5557)),
        ("tcp://127.0.0.1:5557", None),
        ("tcp://[::1]:5557", None),
        ("tcp://[::ffff:127.0.0.1]:5557", None),
        ("tcp://localhost:5557", None),
        ("ipc:///run/vllm/events", None),
        ("inproc://events", None),
        ("tcp://*", None),
        ("tcp://*:port", None),
        ("", None),
    ],
)
def test_others_try_what_is_not_bound_to_its_own_host(endpoint: str, target: tuple[str, int] | None) -> None:
    assert target_of(endpoint, "gpu0") == target


@contextmanager
def published(host: str) -> Iterator[int]:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.linger = 0
        yield socket.bind_to_random_port(f"tcp://{host}")


@on_a_network
async def test_what_is_bound_to_every_address_is_open_and_says_where() -> None:
    with published("*") as port:
        assert await open_ones((f"tcp://*:{port}",), THIS_MACHINE, 2.0) == {f"tcp://*:{port}": f"{HERE} port {port}"}


@on_a_network
async def test_what_says_so_and_is_bound_to_this_host_alone_is_not() -> None:
    with published("127.0.0.1") as port:
        assert await open_ones((f"tcp://*:{port}",), THIS_MACHINE, 2.0) == {}


@on_a_network
async def test_a_port_that_accepts_and_is_no_zeromq_is_not_taken_for_one() -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "0.0.0.0", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await open_ones((f"tcp://*:{port}",), THIS_MACHINE, 2.0) == {}


@on_a_network
async def test_one_that_accepts_and_says_nothing_is_left_after_the_timeout() -> None:
    held: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(lambda _, writer: held.append(writer), "0.0.0.0", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(5):
            assert await open_ones((f"tcp://*:{port}",), THIS_MACHINE, 0.2) == {}
        for writer in held:
            writer.close()


async def test_on_a_machine_without_a_network_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_endpoints, "_FAR_AWAY", ("127.0.0.1", 9))
    assert isinstance(await open_ones(("tcp://*:5557",), THIS_MACHINE, 0.2), Unknown)
    assert await open_ones(("ipc:///run/vllm/events",), THIS_MACHINE, 0.2) == {}
