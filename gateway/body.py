"""A request's body, read whole, its bytes accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from gateway.admission import Admission
from gateway.errors import ApiError

More = Callable[[], Awaitable[bytes]]
"""The next piece of a body; empty at its end."""


class Body:
    """A request's body, its bytes accounted for until `release`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._held_bytes = 0

    async def read(self, headers: Mapping[str, str], more: More) -> bytes:
        """Read it whole. Raises ApiError as soon as it is too large, and what `more` raises."""
        if headers.get("content-encoding", "identity").lower() not in ("identity", ""):
            raise ApiError(
                415, "unsupported_encoding", "content-encoding: compressed bodies are not accepted.", "content-encoding"
            )
        declared = headers.get("content-length", "")
        if declared.isdigit():
            self._admission.refuse_larger(int(declared))
        chunks: list[bytes] = []
        while chunk := await more():
            self._hold(len(chunk))
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def read_within(self, limit_s: float, headers: Mapping[str, str], more: More) -> bytes:
        """The same; a client that is slow to send it must not hold a place for ever."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.read(headers, more)
        except TimeoutError:
            message = f"body: not complete after {limit_s:g} s (timeouts.body_s)."
            raise ApiError(408, "body_timeout", message, "body", {"connection": "close"}) from None

    def _hold(self, count: int) -> None:
        self._admission.hold(count, self._held_bytes)
        self._held_bytes += count

    def release(self) -> None:
        self._admission.let_go(self._held_bytes)
        self._held_bytes = 0
