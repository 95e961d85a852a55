"""The request path: admit, read, place, send, relay, release.

Before the first byte of an answer reaches the client, another replica can replace one that fails, and the client
notices nothing. After that byte, a broken stream ends with an error event. Every ending releases what the request held.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import structlog

from coordinator.spending import NANOS
from coordinator.usage import Row
from gateway.billing.ledger import Ledger
from gateway.deadlines import Deadlines
from gateway.endpoints import Endpoint, endpoint_of
from gateway.errors import ApiError
from gateway.http.exchange import ClientGone, Exchange
from gateway.metrics.gateway_metrics import Metrics
from gateway.metrics.label_values import OTHERS
from gateway.relay.attempts import Attempts
from gateway.relay.reply import Reply
from gateway.relay.request_record import Recorder
from gateway.relay.stored_objects import StoredObjects
from gateway.request.admission import Admission, AdmissionSlot, holder_of
from gateway.request.body import accept_body, receive_body
from gateway.request.keyring import Caller, Keyring
from gateway.request.memory import LARGE_BYTES, LargeBodies
from gateway.request.reader import MODEL_NOT_FOUND, Reader
from gateway.request.reading import Body
from gateway.settings.limit_settings import TimeoutSettings
from gateway.tracing.tracing import Tracing

_log = structlog.get_logger("kvgate.proxy")

Identify = Callable[[Exchange], Awaitable[Caller]]
CLIENT_GONE = 499
"""The status that is counted if the client hung up (nginx's convention)."""


class Proxy:
    """Answers requests to the paths that replicas serve."""

    def __init__(
        self,
        timeouts: TimeoutSettings,
        *,
        keyring: Keyring,
        admission: Admission,
        reader: Reader,
        attempts: Attempts,
        objects: StoredObjects,
        metrics: Metrics,
        recorder: Recorder,
        ledger: Ledger,
        tracing: Tracing,
    ) -> None:
        self._tracing = tracing
        self._keyring = keyring
        self._admission = admission
        self._reader = reader
        self._attempts = attempts
        self._objects = objects
        self._metrics = metrics
        self.use(timeouts)
        self._recorder = recorder
        self._ledger = ledger
        self._deadlines = Deadlines()
        self._large_bodies = LargeBodies()

    def use(self, timeouts: TimeoutSettings) -> None:
        """Bodies that begin to come from now on have this time."""
        self._body_s = timeouts.body_s

    async def __call__(self, exchange: Exchange, identify: Identify | None = None) -> None:
        """Answers one request. Every ending is counted and logged here. `identify` says who sends it, if not an API key
        does."""
        started = time.perf_counter()
        endpoint = endpoint_of(exchange.path)
        reply = Reply(exchange, endpoint.api, started)
        slot: AdmissionSlot | None = None
        caller: Caller | None = None
        try:
            caller = await identify(exchange) if identify else self._keyring.identify(exchange.headers)
            reply.trace = self._tracing.begin(exchange.headers)  # not before: a traceparent is obeyed
            if "sec-websocket-key" in exchange.headers:
                raise _no_websocket()
            self._reader.paths.refuse(exchange.path)
            slot = self._admission.admit(holder_of(caller, exchange.peer))
            await self._serve(exchange, reply, caller, slot)
        except ApiError as error:
            reply.refuse(error)
        except ClientGone:
            reply.status = CLIENT_GONE
            self._metrics.disconnects.inc()
        except asyncio.CancelledError:
            # The grace period of the shutdown is over.
            reply.refuse(ApiError(503, "shutting_down", "This gateway stopped before it could finish."))
        except Exception as error:
            # The place, not the text: an exception's text may hold a piece of the prompt.
            raised = traceback.extract_tb(error.__traceback__)[-1]
            _log.error(
                "unexpected failure",
                request_id=reply.request_id,
                error=type(error).__name__,
                at=f"{raised.filename}:{raised.lineno}",
            )
            reply.refuse(ApiError(500, "internal_error", "This gateway failed; its log says where."))
        finally:
            if slot is not None:
                if slot.held_bytes >= LARGE_BYTES:
                    self._large_bodies.released()
                slot.release()
            duration_s = time.perf_counter() - started
            self._count(endpoint, reply, caller, duration_s)
            if caller is not None:
                self._bill(reply, caller, duration_s)
            self._recorder.note(exchange, endpoint, reply, caller, duration_s)

    async def _receive(self, slot: AdmissionSlot, exchange: Exchange) -> Body:
        """The whole body of a request that is still arriving."""
        return await receive_body(slot, exchange.headers, exchange.receive, self._deadlines, self._body_s)

    async def _serve(self, exchange: Exchange, reply: Reply, caller: Caller, slot: AdmissionSlot) -> None:
        """Reads the request and runs its attempts. If the client hangs up, it stops at once, and the replica aborts."""
        if exchange.has_body:  # as most have
            body = accept_body(slot, exchange.headers, exchange.take())
        else:
            body = await self._receive(slot, exchange)
        slot.begin()
        if exchange.is_gone:
            raise ClientGone
        exchange.stops_when_gone = True
        try:
            job = await self._reader.read(
                exchange, reply.request_id, caller, slot, body, is_traced=reply.trace.is_traced
            )
            del body  # only the job's body still counts as held
            if job.refers_to or job.endpoint.prompt is None:  # most requests can name no stored object
                await self._objects.pin(job)
            await self._attempts.run(job, reply)
        except asyncio.CancelledError:
            if exchange.is_gone:
                exchange.task.uncancel()
                raise ClientGone from None
            raise
        finally:
            exchange.stops_when_gone = False

    def _count(self, endpoint: Endpoint, reply: Reply, caller: Caller | None, duration_s: float) -> None:
        metrics, label, job = self._metrics, endpoint.label, reply.job
        model = (job.model or "") if job is not None else OTHERS if reply.code == MODEL_NOT_FOUND else ""
        model, tenant = metrics.names.of(model, (caller.tenant if caller is not None else None) or "")
        metrics.requests.inc(label, str(reply.status), model, tenant)
        metrics.duration_s.observe(duration_s, label)
        if reply.first_byte_s is not None:
            metrics.time_to_first_token_s.observe(reply.first_byte_s, label, model, tenant)
            if job is not None:
                metrics.first_tokens.note(job.route.served.pool, reply.first_byte_s)
        tokens, usage = dict[str, int](), reply.usage
        if usage is not None:
            tokens = {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens or 0, "output": usage.output_tokens}
        for kind, count in tokens.items():
            metrics.tokens.inc(kind, model, tenant, by=count)
        if job is not None and (offer := job.route.offer) is not None and offer.options:
            status = "broken" if reply.code and reply.status < HTTPStatus.BAD_REQUEST else str(reply.status)
            metrics.backends.note(offer.model, job.route.option, status, reply.first_byte_s, tokens)

    def _bill(self, reply: Reply, caller: Caller, duration_s: float) -> None:
        """Counts a request in the ledger. It took what its budgets pay for: nothing if it was refused, or failed by its
        replica's fault; what the engine did until then if its client hung up, or its time was over."""
        job, ticket = reply.job, reply.tickets[-1] if reply.tickets else None
        has_failed = reply.status >= HTTPStatus.BAD_REQUEST and reply.status != CLIENT_GONE
        placed_ms = ticket.placement.placed_ms if ticket is not None and ticket.placement is not None else 0
        row = Row(caller.tenant or "", caller.key, (job.route.counts_as if job is not None else None) or "")
        cost_nanos = self._ledger.count(
            placed_ms / 1000 or time.time() - duration_s,
            row,
            ticket.billed if ticket is not None else None,
            job.images if job is not None else 0,
            is_error=has_failed or bool(reply.code),
        )
        if cost_nanos:
            self._metrics.cost.inc(*self._metrics.names.of(row.model, row.tenant), by=cost_nanos / NANOS)


def _no_websocket() -> ApiError:
    """A 426 for a client that would rather have a WebSocket: it makes Codex and others use HTTP at once."""
    message = "WebSockets are not passed on; send this request by HTTP."
    return ApiError(426, "upgrade_not_possible", message, headers={"upgrade": "HTTP/1.1"})
