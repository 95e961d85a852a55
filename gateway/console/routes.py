"""The routes of the console."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from heapq import nlargest
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from coordinator.errors import StoreError
from gateway.console.cluster import ClusterView
from gateway.console.findings import Findings
from gateway.console.guesses import Guesses
from gateway.console.prefixes import Prefixes
from gateway.console.sessions import COOKIE, LASTS_S, Sessions
from gateway.control.budgets import BudgetView
from gateway.control.decisions import Decisions
from gateway.control.explain import Explainer
from gateway.control.operations import Operations, store_away
from gateway.control.past_decisions import PastDecisions
from gateway.control.routes import refuse_other_origins
from gateway.control.usage import UsageReport
from gateway.errors import ApiError
from gateway.metrics.fast_counters import FastCounter
from gateway.request.keyring import Caller

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_TICK_S, _CHECKED_S = 0.25, 10.0
_FORM_S = 10.0
_MOST_FORM_BYTES = 4096
_MOST_BUDGETS = 100


def add_console(
    app: FastAPI,
    sessions: Sessions,
    *,
    cluster: ClusterView,
    decisions: Decisions,
    past: PastDecisions,
    prefixes: Prefixes,
    findings: Findings,
    explained: Explainer,
    operations: Operations,
    usage: UsageReport,
    budgets: BudgetView,
    logins: FastCounter,
    is_over: Callable[[], bool],
) -> None:
    """Add the page, its stream, its login and what it asks to the application."""
    texts = {file.name: file.read_text() for file in (files(__package__) / "page").iterdir()}
    assets = {name: kind for name in texts if (kind := _TYPES.get(name[name.rfind(".") :]))}
    _add_login(app, sessions, logins, texts["login.html"])
    _add_live(app, sessions, Shown(cluster, decisions, findings), is_over)
    _add_acts(app, sessions, prefixes, explained, operations)
    _add_usage(app, sessions, usage, budgets)
    _add_past(app, sessions, past)

    @app.get("/console")
    async def page(request: Request) -> Response:
        if await sessions.caller(_cookie(request)) is None:
            return RedirectResponse("/console/login" + ("?ended" if _cookie(request) else ""), 303, _HEADERS)
        return _html(texts["page.html"].replace("{{token}}", sessions.token(_cookie(request))))

    @app.get("/console/{name}")
    async def asset(name: str) -> Response:
        if name not in assets:
            raise ApiError(404, "not_found", "The console has no such page.")
        return Response(texts[name], headers=_HEADERS, media_type=assets[name])


class Shown(NamedTuple):
    """What an open page is told of."""

    cluster: ClusterView
    decisions: Decisions
    findings: Findings


def _add_live(app: FastAPI, sessions: Sessions, shown: Shown, is_over: Callable[[], bool]) -> None:
    @app.get("/console/live")
    async def live(request: Request) -> Response:
        await sessions.logged_in(_cookie(request))
        shown.decisions.refuse_too_many()

        async def is_allowed() -> bool:
            try:
                return await sessions.caller(_cookie(request)) is not None
            except ApiError:  # the store is away, and with it the secret
                return True

        events = _live(shown, is_allowed, is_over)
        return StreamingResponse(events, headers=_HEADERS | {"x-accel-buffering": "no"}, media_type="text/event-stream")


def _add_acts(
    app: FastAPI, sessions: Sessions, prefixes: Prefixes, explained: Explainer, operations: Operations
) -> None:
    @app.get("/console/prefixes")
    async def show_prefixes(request: Request) -> Response:
        await sessions.logged_in(_cookie(request))
        try:
            return _json(await prefixes.look())
        except StoreError as error:
            raise store_away(error) from None

    @app.post("/console/explain")
    async def explain(request: Request) -> Response:
        return await explained(request, await _acting(sessions, request), None)

    async def drain(request: Request, name: str, *, is_over: bool) -> Response:
        await _acting(sessions, request)
        refuse_other_origins(request)  # without API keys, there is no token
        return _json(orjson.dumps(await operations.drain(name, is_over=is_over)))

    @app.post("/console/replicas/{name}/drain")
    async def begin(request: Request, name: str) -> Response:
        return await drain(request, name, is_over=False)

    @app.post("/console/replicas/{name}/undrain")
    async def end(request: Request, name: str) -> Response:
        return await drain(request, name, is_over=True)


def _add_usage(app: FastAPI, sessions: Sessions, usage: UsageReport, budgets: BudgetView) -> None:
    @app.get("/console/usage")
    async def show_usage(request: Request) -> Response:
        """This month's, by tenant and model."""
        answer, _ = await usage(await sessions.logged_in(_cookie(request)), {})
        return _json(answer)

    @app.get("/console/budgets")
    async def show_budgets(request: Request) -> Response:
        """Those of which most is used first; how many `more` there are."""
        told = await budgets.listed(await sessions.logged_in(_cookie(request)))
        most_used = nlargest(_MOST_BUDGETS, told["budgets"], key=lambda each: -each["left"] / each["budget"])
        return _json(orjson.dumps(told | {"budgets": most_used, "more": len(told["budgets"]) - len(most_used)}))


def _add_past(app: FastAPI, sessions: Sessions, past: PastDecisions) -> None:
    @app.get("/console/decisions/{request_id:path}")
    async def look_back(request: Request, request_id: str) -> Response:
        return _json(orjson.dumps(await past.find(await sessions.logged_in(_cookie(request)), request_id)))


def _add_login(app: FastAPI, sessions: Sessions, logins: FastCounter, form: str) -> None:
    @app.get("/console/login")
    async def show_login(request: Request) -> Response:
        return _html(form.replace("{{problem}}", _ENDED if "ended" in request.query_params else ""))

    guesses = Guesses()

    @app.post("/console/login")
    async def login(request: Request) -> Response:
        address = request.client.host if request.client else ""
        try:
            key = await _key_in(request)
            guesses.check(address, time.monotonic())  # behind the body, which many may hold back and send together
            cookie = await sessions.begin(key)
        except ApiError as error:
            logins.inc(error.code)
            if error.code in _GUESSED:
                guesses.failed(address, error.code, time.monotonic())
            problem = form.replace("{{problem}}", _PROBLEMS.get(error.code, _AWAY))
            return _html(problem, error.status, error.headers)
        logins.inc("ok")
        answer = RedirectResponse("/console", 303, _HEADERS)
        is_secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
        answer.set_cookie(COOKIE, cookie, LASTS_S, path="/console", secure=is_secure, httponly=True, samesite="strict")
        return answer

    @app.post("/console/logout")
    async def logout(request: Request) -> Response:
        await _acting(sessions, request)
        await sessions.end(_cookie(request))
        answer = Response(status_code=204, headers=_HEADERS)
        answer.delete_cookie(COOKIE, path="/console", httponly=True, samesite="strict")
        return answer


_ENDED = "Your session has ended. Log in again."
_AWAY = "Redis does not answer, and it has the secret of the sessions. Try again shortly."
_PROBLEMS = {
    "missing_api_key": "Enter an admin key.",
    "invalid_api_key": "This key is not known here.",
    "admin_key_required": "This is a valid key, but no admin key.",
    "request_too_large": "This is too long for a key.",
    "request_timeout": "The form did not come in time. Try again.",
    "too_many_logins": "Too many failed logins from this address. Try again in a minute.",
}
_GUESSED = ("invalid_api_key", "admin_key_required")


async def _live(
    shown: Shown, is_allowed: Callable[[], Awaitable[bool]], is_over: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """First `recent`, the last records of requests. Then the cluster twice a second as the event `cluster`; what the
    doctor finds as `doctor`; records of requests as `decisions`; `dropped` with how many of these were left out;
    `trouble` with why none come ("": they do). It ends when the session does."""
    last: dict[str, Any] = {"trouble": b'""'}
    checked_s = time.monotonic()
    with shown.decisions.watching({}) as viewer:
        yield b"event: recent\ndata: %b\n\n" % orjson.dumps(shown.decisions.recent())
        while not is_over():
            if time.monotonic() - checked_s >= _CHECKED_S:
                checked_s = time.monotonic()
                if not await is_allowed():
                    return
            records, dropped = viewer.take()
            now = {
                "cluster": await shown.cluster.look(),
                "doctor": shown.findings.latest(),
                "trouble": orjson.dumps(viewer.trouble),
            }
            news = {name: data for name, data in now.items() if data and data != last.get(name)}
            last |= news
            if records:
                news["decisions"] = orjson.dumps(records)
            if dropped:
                news["dropped"] = b"%d" % dropped
            if news:
                yield b"".join(b"event: %b\ndata: %b\n\n" % (name.encode(), data) for name, data in news.items())
            await asyncio.sleep(_TICK_S)


async def _key_in(request: Request) -> str:
    """The key in a form of one field."""
    body = b""
    try:
        async with asyncio.timeout(_FORM_S):
            async for piece in request.stream():
                body += piece
                if len(body) > _MOST_FORM_BYTES:
                    raise ApiError(413, "request_too_large", "key: it is too long.")
    except TimeoutError:
        raise ApiError(408, "request_timeout", "The form did not come in time.") from None
    except ClientDisconnect:
        return ""
    return parse_qs(body.decode("latin-1"), encoding="latin-1").get("key", [""])[0].strip()


async def _acting(sessions: Sessions, request: Request) -> Caller:
    return await sessions.acting(_cookie(request), request.headers.get("x-kvgate-csrf", ""))


def _cookie(request: Request) -> str:
    return request.cookies.get(COOKIE, "")


def _html(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(text, status, {**_HEADERS, **(headers or {})}, "text/html")


def _json(body: bytes) -> Response:
    return Response(body, headers=_HEADERS, media_type="application/json")
