"""The request path: read, place, forward, retry, relay, settle.

Until the first byte of an answer reaches the client, a failing replica costs the client nothing: the attempt is given
back and placed elsewhere in one step. After that the stream ends with an error event, never by silence. Whatever
happens, the reservation is given back once.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable

import structlog

from gateway.admission import Admission, Caller, Keyring
from gateway.asgi import Body, ClientGone, Receive, Scope, Send, headers_of, request_id, send_error
from gateway.attempt import Attempts
from gateway.errors import ApiError
from gateway.job import Job
from gateway.metrics import Metrics
from gateway.reader import Reader
from gateway.reply import Reply
from gateway.tasks import Tasks

_log = structlog.get_logger("kvgate.proxy")

CLIENT_GONE = 499
"""What a request whose client hung up counts as (nginx's convention)."""

_LARGE_BYTES = 2**20

Pin = Callable[[Job], Awaitable[None]]


class Proxy:
    """The hot routes, as one raw ASGI application."""

    def __init__(
        self,
        keyring: Keyring,
        admission: Admission,
        reader: Reader,
        attempts: Attempts,
        pin: Pin,
        metrics: Metrics,
        tasks: Tasks,
        body_s: float,
    ) -> None:
        self._keyring = keyring
        self._admission = admission
        self._reader = reader
        self._attempts = attempts
        self._pin = pin
        self._metrics = metrics
        self._tasks = tasks
        self._body_s = body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every ending is counted and logged here."""
        started = time.perf_counter()
        headers = headers_of(scope)
        reply = Reply(send, request_id(headers), started)
        body = Body(self._admission)
        self._metrics.in_flight.inc()
        try:
            with self._admission.enter():
                caller = self._keyring.identify(headers)
                self._reader.refuse_denied(scope["path"])
                data = await self._receive(body, headers, receive)
                job = await self._read(scope, headers, reply.request_id, caller, data)
                await self._serve(job, receive, reply)
        except ApiError as error:
            await self._refuse(reply, error)
        except ClientGone:
            reply.status = CLIENT_GONE
            self._metrics.disconnects.inc()
        except asyncio.CancelledError:
            # The grace period is over: this is the answer, and nothing is left that could be cancelled.
            await self._refuse(reply, ApiError(503, "shutting_down", "This gateway stopped before it could finish."))
        except Exception as error:
            # Where, not what: an exception's text may hold a piece of the prompt.
            place = traceback.extract_tb(error.__traceback__)[-1]
            _log.error(
                "unexpected failure",
                request_id=reply.request_id,
                error=type(error).__name__,
                at=f"{place.filename}:{place.lineno}",
            )
            await self._refuse(reply, ApiError(500, "internal_error", "This gateway failed; its log says where."))
        finally:
            body.release()
            self._metrics.in_flight.dec()
            self._count(scope["path"], reply, time.perf_counter() - started)

    async def _receive(self, body: Body, headers: dict[str, str], receive: Receive) -> bytes:
        """The whole body; a client that is slow to send it must not hold a place for ever."""
        try:
            async with asyncio.timeout(self._body_s):
                return await body.read(headers, receive)
        except TimeoutError:
            message = f"body: not complete after {self._body_s:g} s (timeouts.body_s)."
            raise ApiError(408, "body_timeout", message, "body", {"connection": "close"}) from None

    async def _read(self, scope: Scope, headers: dict[str, str], request_id: str, caller: Caller, data: bytes) -> Job:
        """Read the request; a large one beside the event loop, so that nobody else's tokens wait for it."""
        if len(data) < _LARGE_BYTES:
            return self._reader.read(scope, headers, request_id, caller, data)
        return await asyncio.to_thread(self._reader.read, scope, headers, request_id, caller, data)

    async def _serve(self, job: Job, receive: Receive, reply: Reply) -> None:
        """Run the attempts, but stop at once when the client hangs up: the replica then aborts."""
        await self._pin(job)
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def hang_up() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        watch = self._tasks.spawn(hang_up(), "client watch")
        try:
            await self._attempts.run(job, reply)
        except asyncio.CancelledError:
            if gone:
                task.uncancel()
                raise ClientGone from None
            raise
        finally:
            watch.cancel()

    async def _refuse(self, reply: Reply, error: ApiError) -> None:
        reply.code = error.code
        if reply.has_started:
            await reply.end_with_error(error)
        else:
            reply.status = error.status
            await send_error(reply.send, error, reply.request_id, reply.receipt)

    def _count(self, path: str, reply: Reply, duration_s: float) -> None:
        label = self._metrics.path_label(path)
        self._metrics.requests.labels(label, reply.status).inc()
        self._metrics.duration_s.labels(label).observe(duration_s)
        if reply.first_byte_s is not None:
            self._metrics.time_to_first_token_s.labels(label).observe(reply.first_byte_s)
        _log.debug(
            "request",
            request_id=reply.request_id,
            path=label,
            status=reply.status,
            code=reply.code,
            replica=reply.replica,
            decision=reply.decision,
            duration_ms=round(duration_s * 1000, 1),
        )
