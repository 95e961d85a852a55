"""The routes that the gateway answers itself: health, readiness, version, metrics, models, explain, those of operators
(replicas, demand, queue, decisions, usage), and the OpenAPI document of all these."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import orjson
from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from gateway import __version__
from gateway.control.budgets import BudgetView
from gateway.control.decisions import Decisions, told
from gateway.control.explain import Explainer
from gateway.control.keys import Keys
from gateway.control.openapi import document
from gateway.control.operations import Operations
from gateway.control.past_decisions import PastDecisions
from gateway.control.replica_changes import ReplicaChanges
from gateway.control.status import Status
from gateway.control.usage import UsageReport
from gateway.errors import ApiError
from gateway.metrics.gateway_metrics import Metrics
from gateway.replicas.fleet import Fleet
from gateway.request.keyring import Caller, Keyring

_SELECTED = frozenset({"tenant", "model", "replica", "request_id"})
"""What of the decisions one may ask for."""
_MOST_BODY_BYTES = 16_384
_GET_OR_HEAD = ["GET", "HEAD"]  # load balancers and uptime checks send HEAD; the exchange then sends no body


def build_control(
    *,
    status: Status,
    fleet: Fleet,
    keyring: Keyring,
    explained: Explainer,
    operations: Operations,
    changes: ReplicaChanges,
    keys: Keys,
    budgets: BudgetView,
    decisions: Decisions,
    past: PastDecisions,
    usage: UsageReport,
    metrics: Metrics,
) -> FastAPI:
    """The FastAPI application. Its errors have OpenAI's error shape."""
    app = FastAPI(
        title="KVGate", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _add_probes(app, status, metrics)
    _add_models(app, fleet, keyring)
    _add_explain(app, keyring, explained)
    _add_operations(app, keyring, operations)
    _add_changes(app, keyring, changes)
    _add_keys(app, keyring, keys, budgets)
    _add_budgets(app, keyring, budgets)
    _add_decisions(app, status, keyring, decisions)
    _add_past_decisions(app, keyring, past)
    _add_usage(app, keyring, usage)
    _add_openapi(app)
    app.add_exception_handler(ApiError, _api_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    return app


def _add_probes(app: FastAPI, status: Status, metrics: Metrics) -> None:
    @app.api_route("/health", methods=_GET_OR_HEAD)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/ready", methods=_GET_OR_HEAD)
    async def ready() -> Response:
        is_ready, body = status.readiness()
        return _json(200 if is_ready else 503, body)

    @app.api_route("/version", methods=_GET_OR_HEAD)
    async def version() -> dict[str, Any]:
        return status.about

    @app.api_route("/metrics", methods=_GET_OR_HEAD)
    async def expose() -> Response:
        await status.refresh_gauges()
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _add_models(app: FastAPI, fleet: Fleet, keyring: Keyring) -> None:
    @app.api_route("/v1/models", methods=_GET_OR_HEAD)
    async def models(request: Request) -> Response:
        caller = keyring.identify(dict(request.headers))
        return _json(200, {"object": "list", "data": _usable(fleet, caller)})

    @app.api_route("/v1/models/{name:path}", methods=_GET_OR_HEAD)
    async def model(request: Request, name: str) -> Response:
        for card in _usable(fleet, keyring.identify(dict(request.headers))):
            if card["id"] == name:
                return _json(200, card)
        raise ApiError(404, "model_not_found", "This model is not served here; GET /v1/models lists what is.", "model")


def _usable(fleet: Fleet, caller: Caller) -> list[dict[str, Any]]:
    """The models that a caller's key may use."""
    return [card for card in fleet.model_cards() if caller.may_use(card["id"])]


def _add_explain(app: FastAPI, keyring: Keyring, explained: Explainer) -> None:
    @app.post("/v1/route/explain")
    async def explain(request: Request, path: str | None = None) -> Response:
        caller = keyring.identify(dict(request.headers))
        if not caller.sees_decisions:
            raise ApiError(403, "admin_key_required", "explain tells what others have sent: it needs an admin key.")
        return await explained(request, caller, path)


def _refuse_others(keyring: Keyring, request: Request) -> Caller:
    """The caller. Raises ApiError unless it is an admin."""
    caller = keyring.identify(dict(request.headers))
    if not caller.is_admin:
        raise ApiError(403, "admin_key_required", f"{request.url.path}: it needs an admin key.")
    return caller


def _add_decisions(app: FastAPI, status: Status, keyring: Keyring, decisions: Decisions) -> None:
    @app.get("/v1/decisions")
    async def watch(
        request: Request,
        tenant: str | None = None,
        model: str | None = None,
        replica: str | None = None,
        request_id: str | None = None,
    ) -> Response:
        caller = _refuse_others(keyring, request)
        if unknown := sorted(set(request.query_params) - _SELECTED):
            message = f"{unknown[0]}: is not known here; known: {', '.join(sorted(_SELECTED))}."
            raise ApiError(400, "invalid_value", message, unknown[0])
        wanted = {"tenant": tenant, "model": model, "replica": replica, "request_id": request_id}
        asked = {name: value for name, value in wanted.items() if value is not None}
        decisions.refuse_too_many()
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        events = told(decisions, asked, lambda: status.is_draining or not keyring.knows(caller))
        return StreamingResponse(events, headers=headers, media_type="text/event-stream")


def _add_past_decisions(app: FastAPI, keyring: Keyring, past: PastDecisions) -> None:
    @app.api_route("/v1/decisions/{request_id:path}", methods=_GET_OR_HEAD)
    async def look_back(request: Request, request_id: str, tenant: str | None = None) -> Response:
        return _json(200, await past.find(keyring.identify(dict(request.headers)), request_id, tenant))


def refuse_other_origins(request: Request) -> None:
    """Raises ApiError for a POST that a web page of another origin can send without asking: any but with this content
    type."""
    if request.method == "POST" and request.headers.get("content-type") != "application/json":
        message = "content-type: send application/json; the body may be empty."
        raise ApiError(415, "unsupported_media_type", message, "content-type")


def _add_operations(app: FastAPI, keyring: Keyring, operations: Operations) -> None:
    async def check(request: Request) -> None:
        refuse_other_origins(request)
        _refuse_others(keyring, request)

    admins = partial(app.api_route, dependencies=[Depends(check)])

    @admins("/v1/demand", methods=_GET_OR_HEAD)
    async def demand(model: str | None = None) -> Response:
        return _json(200, await operations.demand(model))

    @admins("/v1/queue", methods=_GET_OR_HEAD)
    async def queue() -> Response:
        return _json(200, await operations.queue())

    @admins("/v1/replicas", methods=_GET_OR_HEAD)
    async def replicas() -> Response:
        return _json(200, {"replicas": await operations.replicas(), "unused": operations.unused()})

    @admins("/v1/replicas/{name}", methods=_GET_OR_HEAD)
    async def replica(name: str) -> Response:
        return _json(200, await operations.replica(name))

    @admins("/v1/replicas/{name}/drain", methods=["POST"])
    async def drain(name: str, move: bool = False) -> Response:
        return _json(200, await operations.drain(name, is_over=False, moves=move))

    @admins("/v1/replicas/{name}/undrain", methods=["POST"])
    async def undrain(name: str) -> Response:
        return _json(200, await operations.drain(name, is_over=True))


def _add_changes(app: FastAPI, keyring: Keyring, changes: ReplicaChanges) -> None:
    @app.post("/v1/replicas")
    async def add(request: Request) -> Response:
        refuse_other_origins(request)
        caller = _refuse_others(keyring, request)
        return _json(200, await changes.add(await _small_body(request), caller.id))

    @app.delete("/v1/replicas/{name}")
    async def remove(request: Request, name: str) -> Response:
        caller = _refuse_others(keyring, request)
        return _json(200, await changes.remove(name, caller.id))


def _add_budgets(app: FastAPI, keyring: Keyring, budgets: BudgetView) -> None:
    @app.api_route("/v1/budgets", methods=_GET_OR_HEAD)
    async def list_budgets(request: Request) -> Response:
        return _json(200, await budgets.listed(keyring.identify(dict(request.headers))))


def _add_keys(app: FastAPI, keyring: Keyring, keys: Keys, budgets: BudgetView) -> None:
    async def asked(request: Request) -> tuple[Caller, bytes]:
        refuse_other_origins(request)
        caller = keyring.identify(dict(request.headers))
        return caller, await _small_body(request)

    @app.api_route("/v1/keys", methods=_GET_OR_HEAD)
    async def list_keys(request: Request) -> Response:
        listed = await keys.listed(keyring.identify(dict(request.headers)))
        return _json(200, {"keys": listed, "currency": budgets.currency})

    @app.post("/v1/keys")
    async def create_key(request: Request) -> Response:
        return _secret(await keys.create(*await asked(request)))

    @app.delete("/v1/keys/{key_id}")
    async def revoke_key(request: Request, key_id: str) -> Response:
        return _json(200, await keys.revoke(keyring.identify(dict(request.headers)), key_id))

    @app.post("/v1/keys/{key_id}/rotate")
    async def rotate_key(request: Request, key_id: str) -> Response:
        caller, body = await asked(request)
        return _secret(await keys.rotate(caller, key_id, body))

    @app.api_route("/v1/audit", methods=_GET_OR_HEAD)
    async def audit(request: Request, limit: int = 100) -> Response:
        caller = keyring.identify(dict(request.headers))
        return _json(200, {"entries": await keys.audit(caller, limit)})


def _add_usage(app: FastAPI, keyring: Keyring, usage: UsageReport) -> None:
    @app.api_route("/v1/usage", methods=_GET_OR_HEAD)
    async def report(request: Request) -> Response:
        caller = keyring.identify(dict(request.headers))
        answer, kind = await usage(caller, request.query_params)
        return Response(answer, headers={"cache-control": "no-store"}, media_type=kind)


async def _small_body(request: Request) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BODY_BYTES:
            raise ApiError(413, "request_too_large", f"body: it has more than {_MOST_BODY_BYTES} bytes.")
    return body


def _secret(answer: dict[str, Any]) -> Response:
    """An answer that no cache keeps."""
    return Response(orjson.dumps(answer), 200, {"cache-control": "no-store"}, "application/json")


def _add_openapi(app: FastAPI) -> None:
    made = cache(partial(document, list(app.routes)))

    @app.api_route("/openapi.json", methods=_GET_OR_HEAD)
    async def openapi() -> Response:
        return Response(made(), media_type="application/json")


async def _api_error(_: Request, error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def _http_error(request: Request, error: HTTPException) -> Response:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.url.path}: {error.detail}."
    return await _api_error(request, ApiError(error.status_code, code, message, headers=dict(error.headers or {})))


def _json(status: int, body: Any) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
