"""One call of Envoy: a request, the replica that it goes to, and the answer.

Envoy says what the client sends, and later what the replica answers. So a call is both ends of a request: the
connection of an `Exchange`, and the source of a replica's `Answer`. What Envoy is told of an answer depends on how far
Envoy is:

- Before the replica has answered, Envoy takes a whole answer (an immediate response) or none. If another replica was
  asked meanwhile, its stream is gathered and given whole.
- After the head of the replica's answer, pieces are told as they come: of this answer, or of another one in its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import grpc

from gateway.deadlines import Deadlines
from gateway.errors import ApiError
from gateway.http.exchange import Exchange, RawHeaders
from gateway.picker import words
from gateway.picker.exchange import PickedExchange
from gateway.upstream import Answer, UpstreamError
from gateway.upstream.connection import Buffer

CURRENT: ContextVar[EnvoyCall | None] = ContextVar("call", default=None)
"""The call whose request the running task answers."""
_HIGH_BYTES, _LOW_BYTES = 2**16, 2**14
_MAX_GATHERED_BYTES = 2**24
"""Of a stream that Envoy can only take whole."""


class EnvoyCall:
    """Envoy's call. `read` takes its messages; `write_all` tells Envoy what the two ends have to say."""

    def __init__(
        self, context: Any, loop: asyncio.AbstractEventLoop, head: words.RequestHead, stops: asyncio.Event
    ) -> None:
        self._context, self._loop, self.head = context, loop, head
        self.stops = stops
        """Set when the picker stops: then no load is held any more."""
        self.exchange = PickedExchange(self, loop, head)
        self.is_sent = False
        """Whether Envoy was told where the request goes. It can be told once."""
        self.over: asyncio.Future[bool] = loop.create_future()
        """Done when Envoy has ended the call, or heard all; true if it has heard a part of an answer that broke off."""
        self.others: Sequence[str] = ()
        """The URLs of replicas that Envoy may try itself."""
        self.on_served: Callable[[str], None] | None = None
        """Called with the `ip:port` that has answered, if it is not the one that was picked."""
        self._picked = ""
        self._to_say: deque[Any] = deque()
        self._body = bytearray()
        """Of the answer, not said yet: the pieces that come meanwhile are one message."""
        self._is_body_over = self._is_all_said = False
        self._wake: asyncio.Future[None] | None = None
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._answer: Answer | None = None
        """The replica's; None before it was asked, and after it was given up."""
        self._came: RawHeaders | None = None
        """The headers of the replica's answer, or of Envoy's own in its place; None before they came."""
        self._came_whole = False
        """Whether that answer has no body."""
        self._gathered: tuple[int, RawHeaders, bytearray] | None = None
        self._has_begun = False
        """Whether Envoy has taken the head of an answer that goes on piece by piece."""
        self._has_passed = False
        """Whether Envoy passes the replica's answer on."""
        self._has_trailers = self._ends_by_trailers = False
        """Whether trailers end the body of the request, and that of the answer."""
        if not head.has_body:
            self.exchange.put_end()

    # -- what Envoy says -----------------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read until Envoy ends the call."""
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                self._heard(message)
                if not self._may_read.is_set():
                    await self._may_read.wait()
        except Exception:
            self.finish(is_broken=True)
            raise
        finally:
            self.finish()

    def _heard(self, message: Any) -> None:
        match message.WhichOneof("of"):
            case "request_body":
                if message.request_body.body:
                    self.exchange.put(message.request_body.body)
                if message.request_body.end_of_stream:
                    self.exchange.put_end()
            case "request_trailers":
                self._has_trailers = True
                self.exchange.put_end()
            case "response_headers":
                self._answer_came(message)
            case "response_body" if self._answer is not None:
                body, is_last = message.response_body.body, message.response_body.end_of_stream
                if body:
                    self._answer.put(body, is_last=is_last)
                if is_last:
                    self._answer.end()
            case "response_trailers":
                self._ends_by_trailers = True
                if self._answer is not None:
                    self._answer.end()

    def _answer_came(self, message: Any) -> None:
        if not self.is_sent:  # Envoy answers itself: the client took too long, for example
            self.finish()
            return
        told, served = message.response_headers, words.served(message)
        if served not in ("", self._picked) and self.on_served is not None:
            self.on_served(served)
        status, headers = words.read_answer_head(told)
        self._came, self._came_whole = headers, told.end_of_stream
        answer = self._answer
        if answer is None:  # it was given up, and another replica may have begun to answer
            if self._gathered is not None and self._can_stream:
                (begun, given, body), self._gathered = self._gathered, None
                self._begin(begun, given, None)
                self._add(body)
            return
        if words.is_envoys_own(status, headers):
            answer.fail(UpstreamError("reset", f"Envoy answers {status} for it"))
            return
        answer.status, answer.headers, answer.has_head = status, headers, True
        if told.end_of_stream or not self.head.shows_answers:
            answer.end()
        answer.wake()

    def finish(self, *, is_broken: bool = False) -> None:
        """Nothing more is said or heard."""
        if not self.over.done():
            self.over.set_result(is_broken)
            self._wake_writer()

    def break_off(self) -> None:
        """The answer will not be complete. Envoy must not take what it has heard for all of it."""
        if self._gathered is None:
            self.finish(is_broken=True)
        else:
            self._gathered = None
            self._say_error(
                ApiError(502, "stream_broken", "Another replica broke its answer off; none of it is given.")
            )

    def leave(self) -> None:
        """The call is over: whoever still waits for it stops."""
        if self._answer is not None:
            self._answer.fail(UpstreamError("reset", "Envoy ended the call"))
        if not self.exchange.is_answered and not self._has_passed:
            self.exchange.lost()

    # -- the far end ---------------------------------------------------------------------------------------------

    async def send(
        self,
        endpoint: str,
        target: str,
        headers: Mapping[str, str],
        body: Sequence[Buffer],
        deadlines: Deadlines,
        idle_s: float,
    ) -> Answer:
        """Send the request to the replica at `endpoint`, and wait for its answer's head. Raises UpstreamError."""
        self.is_sent, self._picked, body_bytes = True, endpoint.partition(",")[0], sum(map(len, body))
        answer = self._answer = Answer(self, self._loop, deadlines, idle_s)
        came = self.head.headers
        self._say(words.picked(came, endpoint, headers, target, body_bytes))
        if self.head.has_body:
            for number, piece in enumerate(body or [b""], 1):
                is_last = number >= len(body) and not self._has_trailers
                for message in words.bodies("request_body", piece, is_last=is_last):
                    self._say(message)
        if self._has_trailers:
            self._say(words.unchanged("request_trailers"))
        try:
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    def pause(self) -> None:
        self._may_read.clear()

    def resume(self) -> None:
        self._may_read.set()

    def abort(self) -> None:
        """The replica's answer is not wanted any more. Envoy goes on reading it until it hears another answer."""
        self._answer = None
        self._may_read.set()

    # -- the near end --------------------------------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        return len(self._body)

    def write(self, data: bytes) -> None:
        """Only HTTP/1.1 has interim responses, and Envoy gives them itself."""

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def answered(self, exchange: Exchange) -> None:
        """Nothing comes after the answer."""

    @property
    def _can_stream(self) -> bool:
        return self._came is not None and not self._came_whole and self.head.shows_answers

    def answer_whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        if self._came is not None and (self._can_stream or (self._came_whole and not body)):
            self._say(words.answer_begins(self._came, status, headers, len(body)))
            if not self._came_whole:
                self._body += body
                self._is_body_over = True
        else:
            self._say(words.immediate(status, headers, body))
        self._all_said()

    def answer_begins(self, status: int, headers: RawHeaders, length_bytes: int | None) -> None:
        if self._can_stream:
            self._begin(status, headers, length_bytes)
        elif not self.head.shows_answers and self._answer is not None:  # its body passes, and Envoy goes on alone
            assert self._came is not None
            self._has_passed = True
            self._say(words.passes(self._came, headers))
            self._all_said()
        else:
            self._gathered = status, headers, bytearray()

    def _begin(self, status: int, headers: RawHeaders, length_bytes: int | None) -> None:
        assert self._came is not None
        self._has_begun = True
        self._say(words.answer_begins(self._came, status, headers, length_bytes))

    def answer_piece(self, piece: bytes, *, is_last: bool) -> None:
        if self._gathered is not None:
            status, headers, body = self._gathered
            body += piece
            if len(body) > _MAX_GATHERED_BYTES:
                self._gathered = None
                self._say_error(
                    ApiError(502, "answer_too_large", "The answer is too large to be given by another replica.")
                )
            elif is_last:
                self._gathered = None
                self._say(words.immediate(status, headers, body))
                self._all_said()
        elif self._has_begun:
            self._add(piece)
            if is_last:
                self._is_body_over = True
                self._all_said()

    def _add(self, piece: bytes | bytearray) -> None:
        self._body += piece
        if len(self._body) > _HIGH_BYTES:
            self.exchange.pause_writing()
        self._wake_writer()

    # -- what Envoy hears ----------------------------------------------------------------------------------------

    def _say(self, message: Any) -> None:
        self._to_say.append(message)
        self._wake_writer()

    def _say_error(self, error: ApiError) -> None:
        """Envoy answers this, and nothing else."""
        self._say(words.refusal(error))
        self._all_said()

    def _all_said(self) -> None:
        self._is_all_said = True
        self._wake_writer()

    def _wake_writer(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def write_all(self) -> None:
        """Tell Envoy what there is to tell, until all is said or the call is over."""
        try:
            while not self.over.done():
                while self._to_say:
                    await self._tell(self._to_say.popleft())
                if self._body or self._is_body_over:
                    await self._tell_body()
                elif self._is_all_said and not self._to_say:
                    self.finish()
                elif not self._to_say:
                    self._wake = self._loop.create_future()
                    await self._wake
        except grpc.aio.BaseError:  # Envoy is gone
            self.finish()

    async def _tell_body(self) -> None:
        body, self._body, is_last = self._body, bytearray(), self._is_body_over
        self._is_body_over = False
        for message in words.bodies("response_body", body, is_last=is_last and not self._ends_by_trailers):
            await self._tell(message)
        if is_last and self._ends_by_trailers:
            await self._tell(words.unchanged("response_trailers"))
        if len(self._body) < _LOW_BYTES:
            self.exchange.resume_writing()

    async def _tell(self, message: Any) -> None:
        if not self.over.done():
            await self._context.write(message)
