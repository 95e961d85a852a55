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

More = Callable[[], Awaitable[bytes | bytearray]]
"""The next piece of a body; empty at its end."""

GRACE_S = 5.0
"""A body may begin as slowly as this before its rate counts."""


def whole_body(place: AdmissionSlot, headers: Mapping[str, str], body: bytes | bytearray) -> bytes | bytearray:
    """A body that is here already. Raises ApiError where it is not taken."""
    _check_head(place, headers)
    if body:
        place.refuse_larger(len(body))
        place.hold(len(body))
    return body


async def upload_body(
    place: AdmissionSlot,
    headers: Mapping[str, str],
    more: More,
    deadlines: Deadlines,
    limit_s: float,
    min_bytes_per_s: int,
) -> bytes | bytearray:
    """Read a body that is still coming, counted as an upload meanwhile. Raises ApiError as soon as it is too large, a
    408 when it is not complete after `limit_s` or slower than `min_bytes_per_s`, and what `more` raises."""
    _check_head(place, headers)
    place.upload()
    started_s, received = time.monotonic(), 0

    async def timed() -> bytes | bytearray:
        nonlocal received
        piece = await more()
        received += len(piece)
        limit.due_s = started_s + min(limit_s, GRACE_S + received / min_bytes_per_s)
        return piece

    try:
        with deadlines.within(min(limit_s, GRACE_S), cast("asyncio.Task[None]", asyncio.current_task())) as limit:
            return await _gathered(place, timed)
    except TimeoutError:
        message = (
            f"body: not complete after {limit_s:g} s (timeouts.body_s), or slower than {min_bytes_per_s} bytes per "
            "second (limits.min_body_bytes_per_s)."
        )
        raise ApiError(408, "body_timeout", message, "body", {"connection": "close"}) from None


async def _gathered(place: AdmissionSlot, more: More) -> bytes | bytearray:
    body: bytes | bytearray = b""
    while piece := await more():
        place.refuse_larger(len(body) + len(piece))
        place.hold(len(piece))
        body = joined(body, piece)
    return body


def _check_head(place: AdmissionSlot, headers: Mapping[str, str]) -> None:
    if headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise ApiError(
            415, "unsupported_encoding", "content-encoding: compressed bodies are not accepted.", "content-encoding"
        )
    declared = headers.get("content-length", "")
    if declared.isdigit():
        place.refuse_larger(int(declared))
