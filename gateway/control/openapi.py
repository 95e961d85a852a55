"""The OpenAPI document of the paths that a gateway answers itself. The console is not in it: it is for browsers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import orjson
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from gateway import __version__

_ABOUT = "The paths that a gateway answers itself. All other API paths go to a replica: docs/endpoints.md lists them."
_KEY, _ADMIN = "Needs an API key.", "Needs an admin's API key."
_KEYS = (
    "Needs an admin's API key, or one with `manages_keys` for keys of its own tenant. Needs `security.records_secret`."
)
_EXPLAIN = "Needs an admin's API key, unless `security.expose_decisions` is set."
_NO_KEYS = "Without `security.api_keys`, nobody needs a key."
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": _NO_KEYS},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": _NO_KEYS},
}
_FAILS = {"description": "It failed. The body says why.", "content": {"application/json": {}}}
_OF_REQUEST = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}
_OF_USAGE = {
    "parameters": [
        {"name": name, "in": "query", "description": words, "schema": {"type": "string"}}
        for name, words in (
            ("from", "The first month, day or hour: 2026-11, 2026-11-28, 2026-11-28T14. Default: this month's."),
            ("to", "The last one, which is included. Default: today."),
            ("by", "hour, day or month (default)."),
            ("group", "Some of tenant, key, model, with commas between them. Default: tenant,model."),
            ("tenant", "Only this one; the usage of others needs an admin's key."),
            ("format", "json (default) or csv."),
        )
    ]
}
_MAY_BE_EMPTY: Mapping[str, Any] = {"requestBody": {"content": {"application/json": {}}}}


class _Told(NamedTuple):
    """What the document says of a path, in addition to what its function tells."""

    summary: str
    needs: str = ""
    """Which API key; empty: none."""
    more: Mapping[str, Any] = {}
    content: str = "application/json"


_TOLD: Final = {
    "/health": _Told("The process lives"),
    "/ready": _Told("Whether this gateway can serve, and why not"),
    "/version": _Told("The version, and a digest of the settings"),
    "/metrics": _Told("Metrics for Prometheus", content="text/plain"),
    "/v1/models": _Told("The models that the replicas serve", _KEY),
    "/v1/models/{name}": _Told("One of these models", _KEY),
    "/v1/route/explain": _Told("Where the request in the body would go, and every cost", _EXPLAIN, _OF_REQUEST),
    "/v1/demand": _Told("What runs and waits at all gateways", _ADMIN),
    "/v1/queue": _Told("Who waits, since when and why", _ADMIN),
    "POST /v1/replicas": _Told("Add a replica", _ADMIN, _OF_REQUEST),
    "DELETE /v1/replicas/{name}": _Told("Remove a replica that was added, gently", _ADMIN),
    "/v1/replicas": _Told("The replicas, their state, requests and keys", _ADMIN),
    "/v1/replicas/{name}": _Told("One of these replicas", _ADMIN),
    "/v1/replicas/{name}/drain": _Told("Take a replica out of service gently", _ADMIN, _MAY_BE_EMPTY),
    "/v1/replicas/{name}/undrain": _Told("Bring a replica back", _ADMIN, _MAY_BE_EMPTY),
    "/v1/budgets": _Told("What is spent of the budgets of your tenant; with an admin key, of all", _KEY),
    "/v1/keys": _Told("The API keys, or a new one, which is shown only once", _KEYS, _MAY_BE_EMPTY),
    "/v1/keys/{key_id}": _Told("Revoke an API key at all gateways", _KEYS),
    "/v1/keys/{key_id}/rotate": _Told("Another API key in the place of this one", _KEYS, _MAY_BE_EMPTY),
    "/v1/audit": _Told("Who has changed which API key, the newest change first", _KEYS),
    "/v1/usage": _Told("What requests took and cost: of the key's tenant, for an admin of all", _KEY, _OF_USAGE),
    "/v1/decisions/{request_id}": _Told("Why the last request of this id went where it went", _KEY),
    "/v1/decisions": _Told("Records of requests as they end, at all gateways", _ADMIN, content="text/event-stream"),
}


def document(routes: Iterable[BaseRoute]) -> bytes:
    """The document of these routes. It takes some ms."""
    told = [_with_words(route) for route in routes if isinstance(route, APIRoute)]
    made = get_openapi(title="KVGate", version=__version__, description=_ABOUT, routes=told)
    made.setdefault("components", {})["securitySchemes"] = _SCHEMES
    return orjson.dumps(made)


def _with_words(route: APIRoute) -> APIRoute:
    """The route as the document shows it. HEAD is left out: it is GET without the body."""
    methods = (route.methods or set()) - {"HEAD"}
    told = _TOLD.get(f"{min(methods)} {route.path_format}") or _TOLD[route.path_format]
    needs = {"description": told.needs, "security": [{name: []} for name in _SCHEMES]} if told.needs else {}
    return APIRoute(
        route.path,
        route.endpoint,
        methods=methods,
        summary=told.summary,
        response_class=Response,
        responses={200: {"content": {told.content: {}}}, "default": _FAILS},
        generate_unique_id_function=lambda route: route.name,
        openapi_extra={**needs, **told.more},
    )
