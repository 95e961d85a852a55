"""What connections took is given back when they are gone."""

from __future__ import annotations

import gc
import weakref

from gateway.request.memory import Storms
from tests.gateway.http.conftest import Served
from tests.polling import eventually


async def test_a_connection_that_is_gone_needs_no_garbage_collector(served: Served) -> None:
    request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n"
    gc.disable()
    try:
        async with served.client() as (reader, writer), served.client() as (_, silent), served.client() as (_, cut):
            writer.write(request + b"x")
            await reader.readuntil(b"\r\n\r\n")
            cut.write(request)
            silent.write(b"GET")
            await eventually(lambda: len(served.state.connections) == 3)
            connections = [weakref.ref(one) for one in served.state.connections]
        await eventually(lambda: not served.state.connections)
        await eventually(lambda: not any(one() for one in connections))
    finally:
        gc.enable()


def test_a_storm_is_over_when_no_more_connections_close() -> None:
    storms = Storms()
    counts = [0, 500, 1500, 900, 100, 5, 5, 4, 4, 150, 20, 20]
    assert [index for index, count in enumerate(counts) if storms.is_over(count)] == [6]
