"""A request's body, read whole, its bytes accounted for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from gateway.deadlines import Deadlines
from gateway.errors import ApiError
from gateway.http.pieces import joined
from gateway.request.admission import AdmissionSlot

ReadPiece = Callable[[], Awaitable[bytes | bytearray]]
"""The next piece of a body; empty at its end."""

GRACE_S = 5.0
"""A body may begin as slowly as this before its rate counts."""


def accept_body(slot: AdmissionSlot, headers: Mapping[str, str], body: bytes | bytearray) -> bytes | bytearray:
    """A body that is here already. Raises ApiError where it is not taken."""
    _check_head(slot, headers)
    if body:
        slot.check_size(len(body))
        slot.hold(len(body))
    return body


async def receive_body(
    slot: AdmissionSlot,
    headers: Mapping[str, str],
    read_piece: ReadPiece,
    deadlines: Deadlines,
    limit_s: float,
    min_bytes_per_s: int,
) -> bytes | bytearray:
    """Read a body that is still coming, counted as an upload meanwhile. Raises ApiError as soon as it is too large, a
    408 when it is not complete after `limit_s` or slower than `min_bytes_per_s`, and what `more` raises."""
    _check_head(slot, headers)
    slot.upload()
    started_s, received = time.monotonic(), 0

    async def timed() -> bytes | bytearray:
        nonlocal received
        piece = await read_piece()
        received += len(piece)
        limit.due_s = started_s + min(limit_s, GRACE_S + received / min_bytes_per_s)
        return piece

    try:
        with deadlines.within(min(limit_s, GRACE_S), cast("asyncio.Task[None]", asyncio.current_task())) as limit:
            return await _gather(slot, timed)
    except TimeoutError:
        message = (
            f"body: not complete after {limit_s:g} s (timeouts.body_s), or slower than {min_bytes_per_s} bytes per "
            "second (limits.min_body_bytes_per_s)."
        )
        raise ApiError(408, "body_timeout", message, "body", {"connection": "close"}) from None


async def _gather(slot: AdmissionSlot, read_piece: ReadPiece) -> bytes | bytearray:
    body: bytes | bytearray = b""
    while piece := await read_piece():
        slot.check_size(len(body) + len(piece))
        slot.hold(len(piece))
        body = joined(body, piece)
    return body


def _check_head(slot: AdmissionSlot, headers: Mapping[str, str]) -> None:
    if headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise ApiError(
            415, "unsupported_encoding", "content-encoding: compressed bodies are not accepted.", "content-encoding"
        )
    declared = headers.get("content-length", "")
    if declared.isdigit():
        slot.check_size(int(declared))
