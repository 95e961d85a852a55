"""Receives a request's body. Its bytes count as held by the request's slot."""

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
"""Gives the next piece of a body; an empty piece at its end."""
GRACE_S = 5.0
"""A body has this time before its rate counts."""
MIN_BYTES_PER_S = 1024
"""The least average speed after that. Any network is faster. Slower bodies only hold places."""


def accept_body(slot: AdmissionSlot, headers: Mapping[str, str], body: bytes | bytearray) -> bytes | bytearray:
    """Accepts a body that is complete already. Raises ApiError if it is refused."""
    _check_headers(slot, headers)
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
) -> bytes | bytearray:
    """Receives a body piece by piece, as an upload. Raises ApiError as soon as the body is too large, and a 408 if it
    is not complete after `limit_s` or too slow. Errors of `read_piece` pass through."""
    _check_headers(slot, headers)
    slot.begin_upload()
    started_s = time.monotonic()
    body: bytes | bytearray = b""
    try:
        with deadlines.within(min(limit_s, GRACE_S), cast("asyncio.Task[None]", asyncio.current_task())) as limit:
            while piece := await read_piece():
                slot.check_size(len(body) + len(piece))
                slot.hold(len(piece))
                body = joined(body, piece)
                limit.due_s = started_s + min(limit_s, GRACE_S + len(body) / MIN_BYTES_PER_S)
            return body
    except TimeoutError:
        message = (
            f"body: not complete after {limit_s:g} s (timeouts.body_s), or slower than {MIN_BYTES_PER_S} bytes per "
            "second."
        )
        raise ApiError(408, "body_timeout", message, "body", {"connection": "close"}) from None


def _check_headers(slot: AdmissionSlot, headers: Mapping[str, str]) -> None:
    """Raises a 415 for a compressed body, and a 413 if the announced size is too large."""
    if headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise ApiError(
            415, "unsupported_encoding", "content-encoding: compressed bodies are not accepted.", "content-encoding"
        )
    declared = headers.get("content-length", "")
    if declared.isdigit():
        slot.check_size(int(declared))
