"""Sends traces over OTLP (HTTP, protobuf) in batches: https://opentelemetry.io/docs/specs/otlp/#otlphttp"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import structlog

from coordinator.redis.outage import Outage
from gateway import __version__
from gateway.metrics.fast_counters import FastCounter
from gateway.tasks import Tasks
from gateway.tracing import backend
from gateway.tracing.backend import NotSent
from gateway.tracing.otel_variables import BadVariable, OtelVariables

_CLOSES_WITHIN_S = 5.0
_AGAIN_S = 5.0
"""The shortest time from a batch that was not taken to the next one."""
_COMES_AGAIN = frozenset({429, 502, 503, 504})
"""With these, a backend says that it takes the same batch later."""
_WRITTEN_AT_ONCE = 8
"""Traces that are written while requests wait: less than a millisecond."""
Trace = TypeVar("Trace")
_log = structlog.get_logger("kvgate.tracing")


class OtlpSender(Generic[Trace]):
    """Traces that wait, and their way to the backend. Who finds no room is lost: no request waits for a backend."""

    def __init__(
        self,
        endpoint: str,
        variables: OtelVariables,
        write: Callable[[Trace], bytes],
        sent: FastCounter,
        lost: FastCounter,
    ) -> None:
        """`write` makes an ExportTraceServiceRequest of a trace, which is not bytes itself. It is called when a batch
        leaves, and not when a request ends: its code would come into the CPU's caches for one trace, and drive out what
        all requests need. `sent` and `lost` count traces. Raises BadVariable."""
        self._endpoint = endpoint
        self._write = write
        self._variables = variables
        self._has_tls = endpoint.lower().startswith("https:")
        self._headers = {
            "user-agent": f"kvgate/{__version__}",
            **variables.headers,
            "content-type": "application/x-protobuf",
        }
        if variables.has_gzip:
            self._headers["content-encoding"] = "gzip"
        self._trusts = variables.tls_context() if self._has_tls else None
        self._waiting: deque[Trace | bytes] = deque()
        """Those that were tried before are written."""
        self._sending = 0
        """Traces of the batch that is sent."""
        self._has_batch, self._closing, self._has_closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._is_failing = False
        self._tasks = Tasks()
        self._sent, self._lost = sent, lost
        self._outage = Outage()
        self._lost_traces = 0
        """Lost since a batch was taken."""

    def start(self) -> None:
        """Begin to send."""
        self._tasks.keep(self._run, "traces")

    def put(self, trace: Trace) -> None:
        """Send this later."""
        if len(self._waiting) >= self._variables.most_waiting or self._has_closed.is_set():
            self._lose(1)
            self._tell("no room in the queue")
            return
        self._waiting.append(trace)
        if len(self._waiting) >= self._variables.batch:
            self._has_batch.set()

    async def close(self) -> None:
        """Send what is left, for at most _CLOSES_WITHIN_S."""
        self._closing.set()
        self._has_batch.set()
        if self._waiting or self._sending:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSES_WITHIN_S):
                    await self._has_closed.wait()
        self._has_closed.set()
        left = len(self._waiting) + self._sending
        await self._tasks.close()
        if left:
            self._lose(left)
            _log.warning("traces lost", traces=left, hint="the gateway stops")

    async def _run(self) -> None:
        while True:
            is_time, is_closing = await self._is_time(), self._closing.is_set()
            waiting, batch = len(self._waiting), self._variables.batch
            await self._send_first(waiting if is_time or is_closing else waiting - waiting % batch)
            if is_closing:
                self._has_closed.set()
                return

    async def _is_time(self) -> bool:
        """Wait for a whole batch, or until it is time for what there is. While the backend takes nothing, a whole batch
        waits for its time, too."""
        awaited, wait_s = self._has_batch, self._variables.delay_s
        if self._is_failing:
            awaited, wait_s = self._closing, max(wait_s, _AGAIN_S)
        try:
            async with asyncio.timeout(wait_s):
                await awaited.wait()
        except TimeoutError:
            return True
        return self._is_failing

    async def _send_first(self, traces: int) -> None:
        """Send so many, until the backend does not take a batch."""
        while traces > 0:
            self._sending = min(traces, self._variables.batch)
            traces -= self._sending
            messages = await self._written([self._waiting.popleft() for _ in range(self._sending)])
            self._sending = len(messages)
            if not messages:
                continue
            try:
                await self._send(b"".join(messages))
            except NotSent as error:
                self._is_failing = True
                await self._begin_anew()
                if not error.is_final:
                    self._waiting.extendleft(reversed(messages))
                    traces = 0
                else:
                    self._lose(len(messages))
                self._tell(error.reason)
            else:
                self._is_failing = False
                self._sent.inc(by=len(messages))
                if self._outage.ended(time.monotonic()) is not None:
                    _log.info("traces are sent again", lost=self._lost_traces)
                self._lost_traces = 0
            self._sending = 0
        if len(self._waiting) < self._variables.batch and not self._closing.is_set():
            self._has_batch.clear()

    async def _written(self, batch: Sequence[Trace | bytes]) -> list[bytes]:
        """The messages of a batch. Traces that cannot be written are lost alone."""
        messages, reason = list[bytes](), ""
        for number, trace in enumerate(batch, 1):
            try:
                messages.append(trace if isinstance(trace, bytes) else self._write(trace))
            except Exception as error:
                reason = type(error).__name__
            if number % _WRITTEN_AT_ONCE == 0:
                await asyncio.sleep(0)
        if unwritable := len(batch) - len(messages):
            self._lose(unwritable)
            _log.warning("traces lost", traces=unwritable, reason=reason, hint="they cannot be written")
        return messages

    async def _send(self, body: bytes) -> None:
        """Raises NotSent."""
        if self._variables.has_gzip:
            body = await asyncio.to_thread(gzip.compress, body, 1)
        try:
            status = await backend.post(self._endpoint, self._trusts, self._headers, body)
        except NotSent:
            raise
        except Exception as error:
            raise NotSent(type(error).__name__, is_final=True) from None
        if not 200 <= status < 300:
            raise NotSent(f"status {status}", is_final=status not in _COMES_AGAIN)

    async def _begin_anew(self) -> None:
        """Somebody may have written other certificates."""
        if self._has_tls and self._variables.has_files:
            with suppress(BadVariable):  # it is written just now, or wrongly
                self._trusts = await asyncio.to_thread(self._variables.tls_context)

    def _lose(self, traces: int) -> None:
        self._lost.inc(by=traces)
        self._lost_traces += traces

    def _tell(self, reason: str) -> None:
        """Traces are not sent, or lost."""
        if self._outage.failed(time.monotonic()) is not None:
            _log.warning("traces are not sent", reason=reason, waiting=len(self._waiting), lost=self._lost_traces)
