"""bench.faults: a link that is cut, blocked in one direction, slowed and repaired."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from bench.faults.proxy import Proxy

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[Proxy], Awaitable[Ends]]


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.fixture
async def proxy(echo: int) -> AsyncIterator[Proxy]:
    proxy = Proxy("127.0.0.1", echo)
    await proxy.start()
    yield proxy
    await proxy.close()


async def said(ends: Ends, text: bytes) -> bytes:
    reader, writer = ends
    writer.write(text)
    return await reader.readexactly(len(text))


@pytest.fixture
async def to() -> AsyncIterator[Connect]:
    """Opens connections and closes them at the end of the test."""
    opened: list[asyncio.StreamWriter] = []

    async def connect(proxy: Proxy) -> Ends:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        opened.append(writer)
        return reader, writer

    yield connect
    for writer in opened:
        writer.close()


async def test_a_cut_link_resets_open_connections_and_refuses_new_ones_until_it_is_mended(
    proxy: Proxy, to: Connect
) -> None:
    reader, _ = ends = await to(proxy)
    assert await said(ends, b"hello") == b"hello"
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    with pytest.raises(ConnectionRefusedError):
        await to(proxy)
    await proxy.mend()
    assert await said(await to(proxy), b"again") == b"again"


@pytest.mark.parametrize("way", ["requests", "answers"])
async def test_what_is_held_one_way_arrives_in_order_once_the_link_is_mended(
    proxy: Proxy, to: Connect, way: str
) -> None:
    reader, writer = ends = await to(proxy)
    assert await said(ends, b"hello") == b"hello"
    getattr(proxy, way).hold()
    for text in (b"one ", b"two"):
        writer.write(text)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await reader.read(1)
    assert not reader.at_eof()
    await proxy.mend()
    assert await reader.readexactly(7) == b"one two"


async def test_a_slow_link_delays_each_way_by_half_and_all_pieces_alike(proxy: Proxy, to: Connect) -> None:
    reader, writer = ends = await to(proxy)
    proxy.slow(0.2)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for _ in range(20):
        writer.write(b"x")
        await asyncio.sleep(0.001)
    await reader.readexactly(20)
    assert 0.2 <= loop.time() - began_s < 20 * 0.2, "pieces do not wait for each other"
    await proxy.mend()
    assert await said(ends, b"soon") == b"soon"
