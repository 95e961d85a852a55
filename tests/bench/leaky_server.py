"""A server that one request harms. `POST /harm` blocks its event loop for a second and leaks 60 MB. From then on the
server refuses chats. Its argument is the port."""

from __future__ import annotations

import asyncio
import re
import sys
from threading import Event

HELD_S, KEPT_BYTES = 1.0, 60_000_000
_kept: list[bytes] = []


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            status, body = "200 OK", b'{"object":"ok"}'
            if head.startswith(b"POST /harm"):
                _kept.append(b"x" * KEPT_BYTES)
                Event().wait(HELD_S)
            elif _kept and head.startswith(b"POST"):
                status, body = "429 Too Many Requests", b'{"error":{"code":"gateway_overloaded"}}'
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    except (OSError, asyncio.IncompleteReadError):
        writer.close()


async def _main(port: int) -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
