"""The routes that are not on the hot path: health, readiness, metrics, models, explain."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from coordinator.chores.repair import KEYS
from coordinator.store import Store
from coordinator.watch.watcher import Watcher
from gateway import __version__
from gateway.control.explain import Explainer
from gateway.deadlines import Deadlines
from gateway.errors import ApiError
from gateway.metrics.gateway_metrics import Metrics
from gateway.replicas.discovery.discovery import Discovery
from gateway.replicas.fleet import Fleet
from gateway.request.admission import Admission, holder_of
from gateway.request.body import upload_body
from gateway.request.keyring import Keyring
from gateway.settings.gateway_settings import GatewaySettings

_ASKS = ["GET", "HEAD"]  # load balancers and uptime checks ask by HEAD; the exchange leaves the body out


class Status:
    """What this gateway can say of itself."""

    def __init__(
        self,
        gateway: str,
        settings: GatewaySettings,
        store: Store,
        watcher: Watcher,
        fleet: Fleet,
        discovery: Discovery,
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self.gateway = gateway
        self._watcher = watcher
        self.about = {"version": __version__, "settings": settings.fingerprint()}
        """What should be the same for all gateways: their settings as a digest of each section."""
        self._admission = admission
        self._store = store
        self._fleet = fleet
        self._discovery = discovery
        self._metrics = metrics
        self.is_draining = False

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether it can serve, and what it would say. A lost store alone never takes a gateway out: while any
        replica is known, it serves by the fallback rule."""
        ready = self._fleet.ready_replicas()
        store_up = self._store.is_up()
        reasons = []
        if self.is_draining:
            reasons.append("this gateway is shutting down")
        if not ready and (store_up or not self._fleet.served):
            reasons += [f"replica {name}: {problem}" for name, problem in self._fleet.problems().items()]
            reasons += [f"{source}: {problem}" for source, problem in self._discovery.problems().items() if problem]
            reasons = reasons or ["no replica is known: configure `replicas` or `discovery`"]
        body = {
            "ready": not reasons,
            "gateway": self.gateway,
            "store": "up" if store_up else "fallback",
            "replicas": ready,
            "exact": [name for name in ready if self._fleet.is_exact(name)],
            "pools": sorted({served.pool for served in self._fleet.served.values()}),
            "reasons": reasons,
        }
        if (missing := self._fleet.problems()) and ready:
            body["not_ready"] = missing
        if taken := self._fleet.taken_ids():
            body["taken_ids"] = taken
        if not store_up:
            body["store_problem"] = self._store.reason
        if (report := self._watcher.report) is not None and report.conditions:
            body["store_conditions"] = list(report.conditions)
            body["store_warnings"] = list(report.conditions.values())
        return not reasons, body

    def refresh_gauges(self) -> None:
        """Gauges that are read from elsewhere, set when they are scraped."""
        metrics = self._metrics
        metrics.store_up.set(self._store.is_up())
        metrics.in_flight.set(self._admission.requests.taken)
        metrics.uploads.set(self._admission.uploads.taken)
        metrics.held_bytes.set(self._admission.held_bytes.taken)
        for key in KEYS:
            pools = [self._store.pool(name) for name in self._store.pool_names()]
            metrics.unreadable.inc(key, by=sum(pool.unreadable.pop(key, 0) for pool in pools))
        for source, problem in self._discovery.problems().items():
            metrics.discovery_up.labels(source).set(not problem)
        for gauge in metrics.of_replicas:
            gauge.clear()  # of a replica that has left, or does not tell any more, nothing stays
        taken = self._fleet.taken_ids()
        for member in self._fleet.used:
            metrics.replica_info.labels(member.id, member.pool).set(1)
            for tally in (metrics.doubts, metrics.passed_over_tokens):
                tally.inc(member.id, by=0)  # there from the start: an increase from nothing is none
            metrics.replica_ready.labels(member.id).set(self._fleet.is_ready(member.id))
            metrics.replica_id_taken.labels(member.id).set(member.id in taken)
            fleet = self._store.pool(member.pool).state if member.pool else None
            if fleet is not None and not member.identity.is_left:
                is_open = fleet.open_until_ms.get(member.id, 0) > fleet.now_ms
                metrics.breaker_open.labels(member.id).set(is_open)
                metrics.replica_active.labels(member.id).set(fleet.active.get(member.id, 0))
                metrics.replica_exact.labels(member.id).set(self._fleet.is_exact(member.id))
                for name, figure in fleet.engines.get(member.id, {}).items():
                    if name in metrics.engine:
                        metrics.engine[name].labels(member.id).set(figure)


def build_control(
    status: Status,
    fleet: Fleet,
    keyring: Keyring,
    admission: Admission,
    explainer: Explainer,
    metrics: Metrics,
    body_s: float,
) -> FastAPI:
    """The FastAPI application; everything it raises comes out in OpenAI's error shape."""
    app = FastAPI(
        title="KVGate", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _add_probes(app, status, metrics)
    _add_models(app, fleet, keyring)
    _add_explain(app, keyring, admission, explainer, body_s)
    app.add_exception_handler(ApiError, _api_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    return app


def _add_probes(app: FastAPI, status: Status, metrics: Metrics) -> None:
    @app.api_route("/health", methods=_ASKS)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/ready", methods=_ASKS)
    async def ready() -> Response:
        is_ready, body = status.readiness()
        return _json(200 if is_ready else 503, body)

    @app.api_route("/version", methods=_ASKS)
    async def version() -> dict[str, Any]:
        return status.about

    @app.api_route("/metrics", methods=_ASKS)
    async def expose() -> Response:
        status.refresh_gauges()
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _add_models(app: FastAPI, fleet: Fleet, keyring: Keyring) -> None:
    @app.api_route("/v1/models", methods=_ASKS)
    async def models(request: Request) -> Response:
        keyring.identify(dict(request.headers))
        return _json(200, {"object": "list", "data": fleet.cards()})

    @app.api_route("/v1/models/{name:path}", methods=_ASKS)
    async def model(request: Request, name: str) -> Response:
        keyring.identify(dict(request.headers))
        for card in fleet.cards():
            if card["id"] == name:
                return _json(200, card)
        raise ApiError(404, "model_not_found", "This model is not served here; GET /v1/models lists what is.", "model")


def _add_explain(app: FastAPI, keyring: Keyring, admission: Admission, explainer: Explainer, body_s: float) -> None:
    deadlines = Deadlines()

    @app.post("/v1/route/explain")
    async def explain(request: Request, path: str | None = None) -> Response:
        headers = dict(request.headers)
        caller = keyring.identify(headers)
        if not caller.sees_decisions:
            raise ApiError(403, "admin_key_required", "explain tells what others have sent: it needs an admin key.")
        place = admission.place(holder_of(caller, request.client.host if request.client else ""))
        more = partial(anext, request.stream(), b"")
        try:
            body = await upload_body(place, headers, more, deadlines, body_s, admission.limits.min_body_bytes_per_s)
            place.begin()
            return _json(200, await explainer.explain(body, headers, caller, place, path))
        except ClientDisconnect:
            return Response(status_code=400)
        finally:
            place.release()


async def _api_error(_: Request, error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def _http_error(request: Request, error: HTTPException) -> Response:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.url.path}: {error.detail}."
    return await _api_error(request, ApiError(error.status_code, code, message, headers=dict(error.headers or {})))


def _json(status: int, body: Any) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
