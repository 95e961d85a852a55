"""Replicas that give honest, prepared answers unless the prompt names a lie.

    python -m bench.attacks.replicas --ports 8101,8102,8103

A prompt that begins with `lie:NAME` gets that lie. `GET /attacks/seen` counts the requests for each lie on all ports.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable

import orjson
import uvloop

from bench.overhead.canned import Answers

_MIB = 2**20
_UNENDED_MIB, _WHOLE_MIB = 48, 400
_SLOW_S = 15.0
_FLOOD_S = 0.005
"""Between two events. It soon fills every buffer, and is no load by itself."""
_LIE = re.compile(rb"lie:([\w-]+)")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
_STREAM = re.compile(rb'"stream": ?true')
_LOOKED_AT_BYTES = 8192
_PIECE = b"x" * 65_536
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_WHOLE = (
    b'{"id":"x","object":"chat.completion","created":1,"model":"canned","choices":[{"index":0,"message":{"content":"',
    b'"},"finish_reason":"stop"}],"usage":{"prompt_tokens":100,"completion_tokens":16,"total_tokens":116}}',
)


async def _pieces(writer: asyncio.StreamWriter, mib: int, frame: bytes = b"%b") -> None:
    """Sends this many MiB as fast as the client reads them."""
    piece = frame % _PIECE
    for _ in range(mib * _MIB // len(_PIECE)):
        writer.write(piece)
        await writer.drain()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _unended_event(writer: asyncio.StreamWriter) -> None:
    writer.write(_STREAM_HEAD + _chunk(b'data: {"choices":[{"index":0,"delta":{"content":"'))
    await _pieces(writer, _UNENDED_MIB, b"10000\r\n%b\r\n")
    writer.write(b"0\r\n\r\n")


async def _huge(writer: asyncio.StreamWriter, mib: int) -> None:
    length = sum(map(len, _WHOLE)) + _WHOLE_MIB * _MIB
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % length)
    writer.write(_WHOLE[0])
    await _pieces(writer, mib)


async def _huge_whole(writer: asyncio.StreamWriter) -> None:
    await _huge(writer, _WHOLE_MIB)
    writer.write(_WHOLE[1])


async def _huge_cut(writer: asyncio.StreamWriter) -> None:
    await _huge(writer, _WHOLE_MIB - 10)
    writer.close()


async def _gzip_cut(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: gzip, chunked\r\n\r\n")
    writer.write(b"ffff\r\n" + _WHOLE[0])
    writer.close()


async def _error(writer: asyncio.StreamWriter) -> None:
    body = b'{"error":{"message":"lie","type":"InternalServerError","param":null,"code":500}}'
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))


async def _slow(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(_SLOW_S)
    body = _WHOLE[0] + _WHOLE[1]
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


async def _flood(writer: asyncio.StreamWriter) -> None:
    writer.write(_STREAM_HEAD)
    while True:
        writer.write(_chunk(b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % _PIECE[:16_384]))
        await writer.drain()
        await asyncio.sleep(_FLOOD_S)


LIES: dict[str, Callable[[asyncio.StreamWriter], Awaitable[None]]] = {
    "unended-event": _unended_event,
    "huge": _huge_whole,
    "huge-cut": _huge_cut,
    "gzip-cut": _gzip_cut,
    "error": _error,
    "slow": _slow,
    "flood": _flood,
}


class Replicas:
    """All replicas. They differ only in their ports."""

    def __init__(self) -> None:
        self._answers = Answers()
        self._seen: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until either side ends it."""
        try:
            while not writer.is_closing():
                await self._answer(await reader.readuntil(b"\r\n\r\n"), reader, writer)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, target, _ = head.split(b" ", 2)
        asked = await _body(head, reader)
        if method == b"GET":
            is_ours = target == b"/attacks/seen"
            writer.write(_json(self._seen) if is_ours else self._answers.get(target.decode()))
        elif (lie := _LIE.search(asked)) and (name := lie[1].decode()) in LIES:
            self._seen[name] += 1
            await LIES[name](writer)
        else:
            answers = self._answers.of(target)
            writer.write(answers.stream if _STREAM.search(asked) else answers.whole)


def _json(counts: Counter[str]) -> bytes:
    body = orjson.dumps(counts)
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    """Returns the beginning of a request's body. Reads the rest and drops it."""
    found = _LENGTH.search(head)
    left = int(found[1]) if found else 0
    beginning = await reader.readexactly(min(left, _LOOKED_AT_BYTES))
    left -= len(beginning)
    while left:
        left -= len(await reader.readexactly(min(left, len(_PIECE))))
    return beginning


async def _serve(ports: list[int]) -> None:
    replicas = Replicas()
    servers = [await asyncio.start_server(replicas.serve, "127.0.0.1", port, limit=_MIB) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.attacks.replicas", description=__doc__)
    parser.add_argument("--ports", required=True, help="comma separated")
    options = parser.parse_args()
    uvloop.run(_serve([int(port) for port in options.ports.split(",")]))


if __name__ == "__main__":
    main()
