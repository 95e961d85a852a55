"""A gateway that also answers the calls of other gateways."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import structlog

from gateway.app import Gateway
from gateway.deadlines import Deadlines
from gateway.errors import ApiError
from gateway.http.asgi import run_asgi
from gateway.http.exchange import Exchange
from gateway.logs import RareWarning
from gateway.picker import words
from gateway.picker.call import CURRENT, EnvoyCall
from gateway.picker.far_end import Endpoints, FarEnd
from gateway.picker.passing import PassingAttempt
from gateway.picker.service import Service
from gateway.relay.attempt import Attempt
from gateway.relay.charges import Charges
from gateway.relay.outgoing import Outgoing
from gateway.relay.proxy import Identify
from gateway.relay.relay import Relay
from gateway.relay.reply import request_id
from gateway.replicas.served import endpoint_in
from gateway.request.keyring import Caller
from gateway.request.paths import is_below
from gateway.request.reader import no_replica, not_in_subset
from gateway.settings.gateway_settings import GatewaySettings

_log = structlog.get_logger("kvgate.picker")
_MODELS = "/v1/models"
_LAST_WORDS_S = 1.0
"""For what calls say that the end of the grace period cuts off."""


class PickingGateway(Gateway):
    """A gateway for clients, and a picker for proxies."""

    _attempt_of = PassingAttempt
    _misconfigured = RareWarning(_log, "a proxy is configured wrongly")

    async def start(self) -> None:
        self.service = Service(self.settings.picker, self.pick)
        self._answering, self._stops = set[asyncio.Task[None]](), asyncio.Event()
        self._fit(self.settings)
        await super().start()
        await self.service.start()
        told = self.settings.picker
        _log.info("picker listens", host=told.host, port=told.port, tls=told.tls != "off")
        self.tasks.spawn(self.service.follow(self.status.is_ready), "health service")

    async def stop(self) -> None:
        """Calls end first, for `timeouts.grace_s` at most. Those that still run then say that the picker stops. All are
        billed before the store is left."""
        grace_s = self.settings.timeouts.grace_s
        self._stops.set()
        stopping = self.tasks.spawn(self.service.stop(grace_s + _LAST_WORDS_S), "stop")
        await asyncio.wait({stopping}, timeout=grace_s)
        late = list(self._answering)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await stopping
        await super().stop()

    def _attempt(self, outgoing: Outgoing, relay: Relay, charges: Charges, deadlines: Deadlines) -> Attempt:
        attempt = super()._attempt(outgoing, relay, charges, deadlines)
        assert isinstance(attempt, PassingAttempt)
        attempt.fallback_endpoints = self.settings.picker.fallback_endpoints
        return attempt

    def _use(self, settings: GatewaySettings) -> None:
        super()._use(settings)
        self._fit(settings)

    def _fit(self, settings: GatewaySettings) -> None:
        """Envoy takes one answer, and none before the replica's: so nobody hedges, and no comments keep a stream
        alive."""
        self.hedges.use(settings.hedge.model_copy(update={"max_share": 0.0}))
        queue = settings.queue.model_copy(update={"keep_alive_s": 0.0})
        self.attempts.use(settings.model_copy(update={"queue": queue}))

    def _far_end(self) -> FarEnd:
        key = self.settings.security.replica_api_key
        self._endpoints = Endpoints()
        return FarEnd(self.upstream, self._endpoints, key.get_secret_value() if key else None)

    async def pick(self, context: Any) -> None:
        """Answer one call. A call that fails does not end well: Envoy would send its request anywhere."""
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if first.WhichOneof("of") != "request_headers":
            why = "the call does not begin with the request's headers: set request_header_mode to SEND"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        try:
            head = words.read_head(first, self.settings.picker.trusts_subset_header)
            if self._is_own(head):
                await self._answer(context, first, head)
            else:
                await pass_on(context, await self._any_endpoint(head))
        except ApiError as error:
            if error.code == "picker_misconfigured":
                self._misconfigured.warn(problem=error.message)
            await context.write(words.refusal(error))

    def _is_own(self, head: words.RequestHead) -> bool:
        """Whether the picker answers or refuses it as a gateway does. Any replica answers others."""
        path, paths = _path(head), self.reader.paths
        return head.method == "OPTIONS" or paths.is_for_replicas(head.method, path) or not paths.may_pass(path)

    async def _answer(self, context: Any, first: Any, head: words.RequestHead) -> None:
        call = EnvoyCall(context, asyncio.get_running_loop(), head, self._stops)
        exchange = call.exchange
        exchange.path, exchange.subset = _path(head), head.subset
        exchange.task = self.tasks.spawn(self._run(call, first), "call")
        self._answering.add(exchange.task)
        exchange.task.add_done_callback(self._answering.discard)
        reading = self.tasks.spawn(call.read(), "call's reader")
        writing = self.tasks.spawn(call.write_all(), "call's writer")
        try:
            is_broken = await call.over
        finally:
            reading.cancel()
            call.finish()
            call.leave()
        await writing  # gRPC cannot end a call in the middle of a message
        if is_broken:
            await context.abort(grpc.StatusCode.INTERNAL, "the answer broke off")

    async def _run(self, call: EnvoyCall, first: Any) -> None:
        CURRENT.set(call)
        exchange = call.exchange
        try:
            if self.cors.answers(exchange):
                return
            if is_below(exchange.path, (_MODELS,)):
                own_id = (b"x-request-id", request_id(exchange.headers).encode())
                await run_asgi(self.control, exchange, [own_id])
            else:
                await self.proxy(exchange, self._identify_by(first))
        finally:
            if not exchange.is_answered:
                call.break_off()

    def _identify_by(self, first: Any) -> Identify | None:
        """Who calls, by what the proxy says; None if API keys tell it."""
        told = self.settings.picker.tenant
        if told is None:
            return None

        async def identify(exchange: Exchange) -> Caller:
            if told.metadata is not None:
                tenant = words.metadata_value(first, told.metadata)
            elif told.attribute is not None:
                tenant = words.attribute_value(first, told.attribute)
            else:
                tenant = exchange.headers.get(told.header or "", "")
            if not tenant:
                raise ApiError(401, "tenant_unknown", "The proxy does not say which tenant sends this request.")
            return Caller(tenant, self.settings.security.expose_decisions, id=tenant, account=tenant)

        return identify

    async def _any_endpoint(self, head: words.RequestHead) -> str:
        """A ready replica for a request that is none of an API. Raises a 503."""
        urls = [self.fleet.members[name].url for name in self.fleet.ready_replicas()]
        if not urls:
            raise no_replica()
        if head.subset is not None:
            urls = [url for url in urls if endpoint_in(url) in head.subset]
        if not urls:
            raise not_in_subset()
        return await self._endpoints.of(random.choice(urls))


def _path(head: words.RequestHead) -> str:
    """A slash at the end means nothing, as in Gateway.answer."""
    return head.path.removesuffix("/") if len(head.path) > 1 else head.path


async def pass_on(context: Any, endpoint: str) -> None:
    """The request goes to this endpoint, and nothing of it or of its answer changes."""
    await context.write(words.passed_on(endpoint))
    while (message := await context.read()) is not grpc.aio.EOF:
        kind = message.WhichOneof("of")
        if kind not in ("request_body", "response_body"):
            await context.write(words.unchanged(kind))
            continue
        body = getattr(message, kind)
        for piece in words.bodies(kind, body.body, is_last=body.end_of_stream):
            await context.write(piece)
