"""Failures on demand: `POST /sim/fail {"mode": …, "count": N, "after_tokens": K, "status": S, "seconds": T}`.

    error      a vLLM error with `status` (500); with after_tokens, an error event inside the stream
    reset      the connection is reset before any byte
    cut        the connection is closed after K streamed tokens (a plain answer: half way through its body)
    truncate   the stream ends cleanly after K tokens, without its closing events; plain answers are unharmed
    hang       nothing is ever answered; with after_tokens, the stream stalls there
    slow       the first token comes `seconds` (1) later
    stall      the engine stands still and the rest works: /health is good, no token comes, no counter moves
    slower     each step of the engine takes `times` (5) as long, until cleared
    unhealthy  /health answers 503
    block      a prompt in a body of `over_bytes` or more keeps the server from answering anything for `seconds`; its
               engine goes on
    crash      the process exits, at once or after a stream's K tokens, with status 3
    no_hits    prompts find no block in the cache, as if another group of the engine had lost its blocks
    no_blocks  nobody can fetch the blocks of a prompt that was computed for another server
    no_push    Mooncake never moves them, and says nothing
    amnesia    the cache forgets all idle blocks, at once and without any KV event
    none       clears them all

    no_bootstrap      its Mooncake bootstrap server answers nobody
    drop_events       a batch of KV events is numbered and can be replayed, but is not sent live
    lose_events       a batch is numbered and never seen again
    duplicate_events  a batch is sent twice
    delay_events      a batch is sent after its successor

`count` is the number of affected inference requests (for `unhealthy`: of health checks; for *_events: of batches); the
default is 1, and -1 means until cleared. A `stall` lasts until cleared. Setting a mode again replaces its former
setting. If several modes are set, the one set first applies.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, get_args

from aiohttp import web
from pydantic import ConfigDict, Field, TypeAdapter

from gateway.simulator.errors import RequestRefused
from gateway.simulator.protocol import checked

_OfRequests = Literal["error", "reset", "cut", "truncate", "hang", "slow", "crash"]
_OfEvents = Literal["drop_events", "lose_events", "duplicate_events", "delay_events"]
_OfPairs = Literal["no_blocks", "no_push", "no_bootstrap"]
_Mode = Literal[_OfRequests, _OfEvents, _OfPairs, "slower", "unhealthy", "stall", "block", "no_hits", "amnesia", "none"]
"""Not a union: the error for an unknown mode names the modes of one Literal only."""
OF_REQUESTS, OF_EVENTS = get_args(_OfRequests), get_args(_OfEvents)
_CRASH_STATUS = 3
_UNTIL_CLEARED = -1
_LINGER_ZERO = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Fault:
    __pydantic_config__ = ConfigDict(extra="forbid")

    mode: _Mode
    count: Annotated[int, Field(ge=_UNTIL_CLEARED)] = 1
    status: Annotated[int, Field(ge=400, le=599)] = 500
    after_tokens: Annotated[int, Field(ge=0)] | None = None
    seconds: float = 1.0
    over_bytes: Annotated[int, Field(ge=0)] = 0
    times: Annotated[float, Field(gt=0)] = 5.0

    @property
    def strikes_first(self) -> bool:
        """Whether it applies before the request is read."""
        return self.mode == "reset" or (self.mode in ("error", "hang") and self.after_tokens is None)

    @property
    def strikes_at_token(self) -> int | None:
        """How many streamed tokens are sent before it applies; None if it does not affect streams."""
        if self.mode in ("cut", "truncate"):
            return self.after_tokens or 0
        return self.after_tokens if self.mode in ("error", "hang", "crash") else None

    def refusal(self) -> RequestRefused:
        return RequestRefused(self.status, f"Simulated failure with status {self.status}")


_BODY = TypeAdapter(Fault)


class Faults:
    """The faults to come."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        """Set unless the engines are stalled."""
        self.goes_on.set()
        self._by_mode: dict[str, Fault] = {}
        self._is_free = asyncio.Event()
        self._is_free.set()
        self.blocked = 0
        """How many prompts have kept the server from answering."""

    def set(self, body: dict[str, Any]) -> Fault:
        """Apply the body of POST /sim/fail. A `crash` without after_tokens happens at once. The caller carries out
        amnesia."""
        fault = checked(_BODY, body)
        if fault.mode == "none":
            self._by_mode.clear()
            self.goes_on.set()
            self._is_free.set()
        elif fault.mode == "crash" and fault.after_tokens is None:
            crash()
        elif fault.mode != "amnesia":
            self._by_mode[fault.mode] = fault
        if fault.mode == "stall":
            self.goes_on.clear()
        return fault

    @property
    def slowness(self) -> float:
        """How many times longer each step of the engine takes."""
        slower = self._by_mode.get("slower")
        return slower.times if slower is not None else 1.0

    def take(self, *modes: str) -> Fault | None:
        """The fault that strikes now, if one of these modes is set. Counts it."""
        fault = next((each for mode, each in self._by_mode.items() if mode in modes), None)
        if fault is not None and fault.count != _UNTIL_CLEARED:
            fault.count -= 1
            if fault.count <= 0:
                del self._by_mode[fault.mode]
        return fault

    async def until_free(self) -> None:
        """Wait while a prompt keeps the server from answering."""
        await self._is_free.wait()

    def block_if_long(self, body_bytes: int) -> None:
        """A prompt begins to keep the server from answering. It goes on with that if its client goes away."""
        blocking = self._by_mode.get("block")
        if blocking is not None and body_bytes >= blocking.over_bytes:
            self.take("block")
            self.blocked += 1
            self._is_free.clear()
            asyncio.get_running_loop().call_later(blocking.seconds, self._is_free.set)

    def active(self) -> list[str]:
        return list(self._by_mode)


def crash() -> NoReturn:
    os._exit(_CRASH_STATUS)


async def hang() -> NoReturn:
    """Wait until the client goes away (or the server stops), which cancels the handler."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("a hung request was woken")


async def close_connection(request: web.Request, reset: bool = False) -> NoReturn:
    """Close the client's connection after the written bytes are sent, or at once with a TCP reset. This cancels the
    handler."""
    transport = request.transport
    if transport is not None and reset:
        pseudo_socket = transport.get_extra_info("socket")
        with socket.socket(fileno=os.dup(pseudo_socket.fileno())) as duplicate:
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        transport.abort()
    elif transport is not None:
        transport.close()
    await hang()
