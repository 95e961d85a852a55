"""Composes a gateway: makes every part once, and passes it to the parts that need it."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Awaitable
from dataclasses import replace

import structlog
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.store import Store, StoreOptions
from coordinator.usage import UsageStore
from coordinator.watch.watcher import Watcher
from gateway.access_log import AccessLog, CannotWrite, check_target
from gateway.billing.ledger import Ledger
from gateway.console.asking import ASK_PATH, Asking
from gateway.console.cluster import ClusterView
from gateway.console.findings import Findings
from gateway.console.history import History
from gateway.console.prefixes import Prefixes
from gateway.console.routes import add_console
from gateway.console.sessions import Sessions
from gateway.control.budgets import BudgetView
from gateway.control.decisions import Decisions
from gateway.control.explain import Explainer
from gateway.control.keys import Keys
from gateway.control.operations import Operations
from gateway.control.past_decisions import PastDecisions
from gateway.control.replica_changes import ReplicaChanges
from gateway.control.routes import build_control
from gateway.control.status import Status
from gateway.control.usage import UsageReport
from gateway.deadlines import Deadlines
from gateway.http.asgi import run_asgi
from gateway.http.cors import Cors
from gateway.http.exchange import Exchange
from gateway.http.hosts import Hosts
from gateway.logs import set_level
from gateway.metrics.gateway_metrics import Metrics
from gateway.metrics.loop_lag import measure_loop_lag
from gateway.metrics.store_metrics import StoreMetrics
from gateway.records.file_keys import FileKeys
from gateway.records.record import Signer
from gateway.records.record_book import RecordBook
from gateway.relay.attempt import Attempt, Sends
from gateway.relay.attempts import Attempts
from gateway.relay.audit import Audit
from gateway.relay.charges import Charges
from gateway.relay.elsewhere import Elsewhere
from gateway.relay.hedges import Hedges
from gateway.relay.moves import Moves
from gateway.relay.outgoing import Outgoing
from gateway.relay.prefill_legs import PrefillLegs
from gateway.relay.proxy import Proxy
from gateway.relay.relay import Relay
from gateway.relay.reply import request_id
from gateway.relay.request_record import Recorder
from gateway.relay.resumptions import Resumptions
from gateway.relay.stored_objects import StoredObjects
from gateway.relay.text_tokens import TextTokens
from gateway.reload import NO_FILES, ConfigFiles, Reload
from gateway.replicas.discovery.added import AddedReplicas
from gateway.replicas.discovery.discovery import Discovery, sources_of
from gateway.replicas.discovery.source import Source
from gateway.replicas.fleet import Fleet
from gateway.replicas.hangs import AnswerProgress, HangDetector
from gateway.replicas.health_checks import HealthChecks
from gateway.replicas.known_models import KnownModels
from gateway.request.admission import Admission
from gateway.request.keyring import Keyring
from gateway.request.objectives import Objectives
from gateway.request.reader import Reader
from gateway.routing.fallbacks import Fallbacks
from gateway.routing.holds import Holds
from gateway.routing.questions import knobs_of
from gateway.routing.router import Router
from gateway.routing.tenants import Tenants
from gateway.settings.config_file import SettingsError
from gateway.settings.gateway_settings import GatewaySettings
from gateway.tasks import Tasks
from gateway.tls import Certificate, Certificates, contexts_of
from gateway.tracing.otel_variables import OtelVariables
from gateway.tracing.tracing import Tracing
from gateway.upstream import Upstream

_log = structlog.get_logger("kvgate")


class Gateway:
    """The parts of one gateway process, alive between `start` and `stop`."""

    access_log: AccessLog | None = None
    findings: Findings | None = None
    history: History | None = None
    asking: Asking | None = None
    _attempt_of: type[Attempt] = Attempt

    def __init__(
        self,
        settings: GatewaySettings,
        certificates: Certificates,
        otel: OtelVariables,
        files: ConfigFiles = NO_FILES,
    ) -> None:
        self.settings, self.certificates = settings, certificates
        # Unique to this run of the process, so that two gateways with one configured id never share reservations.
        self.id = f"{settings.id}.{secrets.token_hex(3)}"
        self.metrics, self.tasks = Metrics(), Tasks()
        self.reload = Reload(files, settings, _prepare, self._use, self.metrics.config_is_used.set)

        # The shared state, and this gateway's work for it beside requests.
        self.store = _store(settings, self.id)
        self.store.on_change = self._store_changed
        self.watcher = Watcher(settings.redis.url, self.id, settings.store.chunk_ttl_s)
        StoreMetrics(self.watcher, self.metrics.registry)

        self.records = _records(settings, self.store)
        progress = self._watch_replicas(settings, certificates)

        # A request on its way: its sender, its admission, its contents, its replica, its answer.
        self.file_keys = FileKeys(self.records)
        self.keyring = keyring = Keyring(settings.security, self.records, self.file_keys)
        self.cors = Cors(settings.security.allow_origins)
        self.hosts = Hosts(settings.security.hosts) if keyring.is_open else None
        self.admission = Admission(settings.limits)
        self.objectives = Objectives(settings.discovery)
        self.reader = Reader(settings, keyring, self.fleet, self.metrics, self.objectives)
        self.tenants = tenants = Tenants(settings)
        self.holds = Holds(settings.queue, self.fleet, self.store, tenants, self.metrics)
        self.router = Router(settings, self.store, self.metrics, self.fleet, tenants, self.holds)
        self.store.on_news, self.fleet.on_change = self._news, self._replicas_changed
        self.moves = Moves(self.fleet, self.health_checks, self.store, progress, self.hangs)
        objects = StoredObjects(self.store, self.fleet)
        self.recorder = recorder = Recorder(settings.id)
        self.tracing = Tracing(settings.tracing, otel, self.id, self.metrics.traces_sent, self.metrics.traces_lost)
        self._log_requests(settings.log.access_log)
        self._keep_records(settings, recorder)
        self.attempts = attempts = self._attempts(tenants, objects, progress)
        self.proxy = self._proxy(keyring, objects, attempts, recorder)

        self.explainer = Explainer(
            settings, self.admission, self.reader, self.router, objects, self.store, Fallbacks(self.fleet)
        )
        self.control = self._own_paths(keyring, self.explainer)

    def _watch_replicas(self, settings: GatewaySettings, certificates: Certificates) -> AnswerProgress:
        """The replicas: how to reach them, which there are, whether they are alive and make progress."""
        self.upstream = _upstream(settings, certificates.shown)
        self.fleet = Fleet(settings.replicas, self.store, self.upstream, settings.models)
        self.known_models = KnownModels(self.fleet, self.store, settings.queue, settings.redis.namespace)
        self.added = AddedReplicas(self.records)
        self.discovery = Discovery(settings.replicas, self._sources(settings), self.fleet.set_targets)
        self.health_checks = HealthChecks(self.fleet, settings.health, self.store, self.upstream)
        progress = AnswerProgress(self.fleet, self.store)
        self.hangs = HangDetector(self.fleet, settings.health, self.store, self.upstream, progress)
        return progress

    def _sources(self, settings: GatewaySettings) -> list[Source]:
        """Where replicas come from that are not listed."""
        return [*sources_of(settings.discovery), *([self.added] if self.records.signer is not None else [])]

    def _use(self, settings: GatewaySettings) -> None:
        """From now on. Requests that run go on as they began."""
        before, self.settings = self.settings, settings
        set_level(settings.log.level)
        if settings.log.access_log != before.log.access_log:
            self._log_requests(settings.log.access_log)
        self.keyring.use(settings.security)
        self.cors = Cors(settings.security.allow_origins)
        self.hosts = Hosts(settings.security.hosts) if self.keyring.is_open else None
        self.admission.use(settings.limits)
        self.reader.use(settings)
        self.router.use(settings)
        self.holds.use(settings.queue)
        self.attempts.use(settings)
        self.elsewhere.use(settings.retries)
        self.resumptions.use(settings.resume)
        self.hedges.use(settings.hedge)
        self.prefill_legs.use(settings)
        self.proxy.use(settings.timeouts)
        self.ledger.use(settings.billing)
        self.usage.use(settings.billing)
        self.budgets.use(settings)
        self.upstream.idle_s = settings.timeouts.idle_s
        self.health_checks.use(settings.health)
        self.hangs.use(settings.health)
        self.known_models.use(settings.queue)
        if settings.discovery != before.discovery:
            self.discovery.use_sources(self._sources(settings))
            self.objectives.use(settings.discovery)
        self.discovery.use_listed(settings.replicas)
        self.fleet.use_models(settings.models)
        self.operations.use(settings)
        self.past.use(settings.decisions)
        self.explainer.use(settings)
        self.status.use(settings)
        if self.findings is not None and self.history is not None:
            self.findings.use(settings)
            self.history.prefill_tokens_per_s = settings.queue.prefill_tokens_per_s

    def _log_requests(self, target: str | None) -> None:
        """Lines of the access log go there from now on."""
        if self.access_log is not None:
            self.recorder.sinks.remove(self.access_log)
            self.access_log.end()
        self.access_log = AccessLog(target, self.metrics.access_log_dropped) if target is not None else None
        if self.access_log is not None:
            self.recorder.sinks.append(self.access_log)

    def _attempts(self, tenants: Tenants, objects: StoredObjects, progress: AnswerProgress) -> Attempts:
        """What sends requests to replicas, until one answers."""
        settings, fleet, metrics = self.settings, self.fleet, self.metrics
        charges, deadlines = Charges(tenants, fleet), Deadlines()
        relay = Relay(self.reader, objects, Audit(metrics, self.tasks, fleet.block_tokens), progress, charges)
        attempt = self._attempt(Outgoing(fleet, tenants), relay, charges, deadlines)
        return Attempts(
            settings,
            keyring=self.keyring,
            admission=self.admission,
            fleet=fleet,
            router=self.router,
            elsewhere=self.elsewhere,
            fallbacks=Fallbacks(fleet),
            attempt=attempt,
            resumptions=self.resumptions,
            charges=charges,
            metrics=metrics,
            deadlines=deadlines,
        )

    def _attempt(self, outgoing: Outgoing, relay: Relay, charges: Charges, deadlines: Deadlines) -> Attempt:
        """What sends a request to one replica."""
        settings, fleet, metrics = self.settings, self.fleet, self.metrics
        self.elsewhere = Elsewhere(settings.retries, fleet, self.router.failures, self.moves, metrics)
        text_tokens = TextTokens(fleet, self.upstream, self.admission)
        self.resumptions = Resumptions(settings.resume, self.admission, text_tokens, metrics)
        self.hedges = Hedges(
            settings.hedge,
            store=self.store,
            moves=self.moves,
            router=self.router,
            elsewhere=self.elsewhere,
            outgoing=outgoing,
            upstream=self.upstream,
            admission=self.admission,
            metrics=metrics,
            tasks=self.tasks,
        )
        self.prefill_legs = PrefillLegs(
            settings,
            fleet=fleet,
            moves=self.moves,
            outgoing=outgoing,
            upstream=self.upstream,
            failures=self.router.failures,
            admission=self.admission,
            metrics=metrics,
            tasks=self.tasks,
        )
        return self._attempt_of(
            settings.timeouts,
            fleet=fleet,
            failures=self.router.failures,
            outgoing=outgoing,
            upstream=self._far_end(),
            moves=self.moves,
            elsewhere=self.elsewhere,
            prefill_legs=self.prefill_legs,
            hedges=self.hedges,
            relay=relay,
            resumptions=self.resumptions,
            charges=charges,
            metrics=metrics,
            deadlines=deadlines,
        )

    def _far_end(self) -> Sends:
        """Where clients' requests are sent to."""
        return self.upstream

    def _proxy(self, keyring: Keyring, objects: StoredObjects, attempts: Attempts, recorder: Recorder) -> Proxy:
        """What answers requests to replicas' paths."""
        return Proxy(
            self.settings.timeouts,
            keyring=keyring,
            admission=self.admission,
            reader=self.reader,
            attempts=attempts,
            objects=objects,
            metrics=self.metrics,
            recorder=recorder,
            ledger=self.ledger,
            tracing=self.tracing,
        )

    def _keep_records(self, settings: GatewaySettings, recorder: Recorder) -> None:
        """What is told and kept of requests that have ended."""
        namespace = settings.redis.namespace
        self.decisions = Decisions(self.store, settings.id, namespace, recorder.sinks, on_watch=self._watched)
        usage = UsageStore(self.store, namespace, self.id)
        self.ledger, self.usage = Ledger(settings.billing, usage), UsageReport(settings.billing, usage)
        not_kept = self.metrics.decisions_not_kept
        self.past = PastDecisions(self.store, namespace, self.keyring, settings.decisions, not_kept)
        recorder.sinks.append(self.past.note)

    def _own_paths(self, keyring: Keyring, explained: Explainer) -> ASGIApp:
        """The application that answers the paths that no replica answers. Without `console.enabled`, the parts of the
        console are not made."""
        settings = self.settings
        self.budgets = BudgetView(settings, self.store, keyring)
        self.status = Status(
            self.id,
            settings,
            reload=self.reload,
            store=self.store,
            records=self.records,
            file_keys=self.file_keys,
            watcher=self.watcher,
            fleet=self.fleet,
            discovery=self.discovery,
            objectives=self.objectives,
            admission=self.admission,
            metrics=self.metrics,
            budgets=self.budgets,
            recent_legs=self.prefill_legs.recent,
        )
        self.operations = Operations(settings, self.fleet, self.store, self.discovery)
        changes = ReplicaChanges(self.records, self.added, self.discovery, self.fleet, self.operations)
        control = build_control(
            status=self.status,
            fleet=self.fleet,
            keyring=keyring,
            explained=explained,
            operations=self.operations,
            changes=changes,
            keys=Keys(self.records, keyring),
            budgets=self.budgets,
            decisions=self.decisions,
            past=self.past,
            usage=self.usage,
            metrics=self.metrics,
        )
        if settings.console.enabled:
            self._add_console(control, keyring, explained)
        return control

    def _add_console(self, control: FastAPI, keyring: Keyring, explained: Explainer) -> None:
        settings = self.settings
        sessions = Sessions(keyring, self.store, settings.redis.namespace, self.records.signer)
        self.findings = findings = Findings(settings, self.certificates.shown, self.fleet, self.status, self.tasks)
        add_console(
            control,
            sessions,
            cluster=ClusterView(self.status, self.operations, self.store),
            decisions=self.decisions,
            past=self.past,
            prefixes=Prefixes(self.store),
            findings=findings,
            explained=explained,
            operations=self.operations,
            usage=self.usage,
            budgets=self.budgets,
            logins=self.metrics.logins,
            is_over=lambda: self.status.is_draining,
        )
        self.history = History(self.store, self.metrics.first_tokens, settings.queue.prefill_tokens_per_s)
        self.asking = Asking(sessions, self.proxy)

    def _watched(self, is_watched: bool) -> None:
        self.router.questions.is_watched = is_watched

    def _news(self) -> None:
        self.holds.wake()
        self.router.leave_dead_pools()

    def _replicas_changed(self) -> None:
        self.router.replicas_changed()
        self._news()

    def _store_changed(self, is_up: bool, _reason: str) -> None:
        if is_up:
            self.metrics.store_reconnects.inc()
            self.router.store_is_up()

    async def start(self) -> None:
        """Connect to the store, check every replica once, and start the background tasks."""
        self.tasks.spawn(measure_loop_lag(self.metrics.loop_lag_s.observe, self.store.lag.heard), "loop lag")
        if self.tracing.sender is not None:
            self.tracing.sender.start()
        for certificate in filter(None, self.certificates):
            self.tasks.keep(certificate.run, certificate.name)
        self.tasks.spawn(self.store.run(), "store")
        await self.store.first_attempt()
        self.tasks.keep(self.records.run, "records")
        await self.records.first_exchange()
        self.tasks.keep(self.file_keys.run, "keys of files")
        self.tasks.spawn(self.known_models.run(), "known models")
        await self.known_models.first_exchange()
        self.tasks.spawn(self.discovery.run(), "discovery")
        await self.discovery.first_answers()
        self.tasks.spawn(self.objectives.run(), "objectives")
        await self.objectives.first_answer()
        self.tasks.keep(self.health_checks.run, "checks")
        await self.health_checks.first_round()
        await self.store.first_attempt()  # of the pools just found, which may have connections of their own
        self.tasks.keep(self.moves.run, "moves")
        self.tasks.keep(self.hedges.run, "hedges")
        self.tasks.keep(self.reload.run, "reload")
        self.tasks.keep(self.decisions.run, "decisions")
        self.tasks.keep(self.ledger.run, "usage")
        self.tasks.keep(self.past.run, "past decisions")
        if self.history is not None:
            self.tasks.keep(self.history.run, "history")
        if self.settings.store.watch:
            self.tasks.spawn(self.watcher.run(), "watcher")
        log = _log.info if self.store.is_up() else _log.warning
        log("gateway started", id=self.id, store=self.store.reason or "up", replicas=self.fleet.describe())

    async def stop(self) -> None:
        """Leave the store, which gives back this gateway's reservations at once, and end the background tasks."""
        await self.ledger.close()
        await self.past.flush()
        await self.store.leave()
        await self.tasks.close()
        await self.reader.close()
        await self.upstream.close()
        if self.tracing.sender is not None:
            await self.tracing.sender.close()
        if self.access_log is not None:
            self.access_log.close()
        _log.info("gateway stopped", id=self.id)

    def answer(self, exchange: Exchange) -> Awaitable[None]:
        """Answer one request: await it. A slash at the end of its path means nothing here, as in vLLM. It is no
        coroutine, because each coroutine on the way costs a request half a microsecond at each wait."""
        if len(exchange.path) > 1:
            exchange.path = exchange.path.removesuffix("/")
        if (self.hosts is not None and self.hosts.refuses(exchange)) or self.cors.answers(exchange):
            return _nothing()
        if self.reader.paths.is_for_replicas(exchange.method, exchange.path):
            return self.proxy(exchange)
        if self.asking is not None and exchange.path == ASK_PATH and exchange.method == "POST":
            return self.asking(exchange)
        return run_asgi(self.control, exchange, [(b"x-request-id", request_id(exchange.headers).encode())])


async def _nothing() -> None:
    """The request was answered already."""


def _prepare(settings: GatewaySettings) -> None:
    """Before settings are used: what may take a while. A thread runs it. Raises SettingsError."""
    try:
        check_target(settings.log.access_log)
    except CannotWrite as error:
        raise SettingsError([str(error)]) from None
    sources_of(settings.discovery)  # imports the libraries of its kinds


def _store(settings: GatewaySettings, gateway: str) -> Store:
    redis = settings.redis
    usual = knobs_of(settings, settings.policy.name)
    knobs = (usual, replace(usual, tells_costs=1)) if settings.decisions.max_bytes else (usual,)
    return Store(StoreOptions(redis.url, redis.budget_ms / 1000, redis.namespace, knobs), gateway)


def _records(settings: GatewaySettings, store: Store) -> RecordBook:
    namespace = settings.redis.namespace
    secret, other = settings.security.records_secret, settings.security.other_records_secret
    if secret is None:
        return RecordBook(store, None, namespace)
    signer = Signer(secret.get_secret_value(), namespace, other.get_secret_value() if other is not None else None)
    return RecordBook(store, signer, namespace)


def _upstream(settings: GatewaySettings, certificate: Certificate | None) -> Upstream:
    key = settings.security.replica_api_key
    return Upstream(settings.timeouts.idle_s, key.get_secret_value() if key else None, contexts_of(certificate))


class App:
    """The application that uvicorn runs. It builds the gateway inside the running event loop (ASGI's lifespan)."""

    def __init__(
        self,
        settings: GatewaySettings,
        certificates: Certificates,
        otel: OtelVariables,
        files: ConfigFiles,
        make: type[Gateway] = Gateway,
    ) -> None:
        self._make = make
        self._made_of = settings, certificates, otel, files
        self._is_asked = False
        self.gateway: Gateway | None = None

    @property
    def settings(self) -> GatewaySettings:
        """Those of now."""
        return self.gateway.settings if self.gateway is not None else self._made_of[0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "lifespan"  # requests come to `answer`
        await receive()
        gateway = self._make(*self._made_of)
        try:
            await gateway.start()
            self.gateway = gateway
            if self._is_asked:
                self.reload()
            # All objects until here live as long as the process, so garbage collections need not visit them again.
            gc.collect()
            gc.freeze()
            await send({"type": "lifespan.startup.complete"})
            await receive()
        finally:
            await gateway.stop()
        await send({"type": "lifespan.shutdown.complete"})

    def reload(self) -> None:
        """Read the configuration again, as soon as the gateway has started."""
        self._is_asked = self.gateway is None
        if self.gateway is not None:
            self.gateway.reload.ask()

    def answer(self, exchange: Exchange) -> Awaitable[None]:
        """Answer one request: await it."""
        assert self.gateway is not None
        return self.gateway.answer(exchange)
