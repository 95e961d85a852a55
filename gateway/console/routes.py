"""The routes of the console."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from gateway.console.cluster import ClusterView
from gateway.console.sessions import COOKIE, LASTS_S, Sessions
from gateway.control.decisions import Decisions
from gateway.errors import ApiError

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_ASSETS = {"console.js": "text/javascript", "console.css": "text/css"}
_TICK_S = 0.25
_MOST_FORM_BYTES = 4096


def add_console(
    app: FastAPI, sessions: Sessions, cluster: ClusterView, decisions: Decisions, is_over: Callable[[], bool]
) -> None:
    """Add the page, its stream and its login to the application."""
    folder = files(__package__)
    texts = {name: (folder / name).read_text() for name in ("page.html", "login.html", *_ASSETS)}
    _add_login(app, sessions, texts["login.html"])

    @app.get("/console")
    async def page(request: Request) -> Response:
        if await sessions.caller(_cookie(request)) is None:
            return RedirectResponse("/console/login", 303, _HEADERS)
        return _html(texts["page.html"].replace("{{token}}", sessions.token(_cookie(request))))

    @app.get("/console/live")
    async def live(request: Request) -> Response:
        if await sessions.caller(_cookie(request)) is None:
            raise ApiError(401, "login_required", "Log in at /console/login.")
        if not decisions.has_room:
            message = "Too many pages are open on this gateway already; use another one."
            raise ApiError(429, "too_many_watch", message, headers={"retry-after": "5"})
        events = _live(cluster, decisions, is_over)
        return StreamingResponse(events, headers=_HEADERS | {"x-accel-buffering": "no"}, media_type="text/event-stream")

    @app.get("/console/{name}")
    async def asset(name: str) -> Response:
        if name not in _ASSETS:
            raise ApiError(404, "not_found", "The console has no such page.")
        return Response(texts[name], headers=_HEADERS, media_type=_ASSETS[name])


def _add_login(app: FastAPI, sessions: Sessions, form: str) -> None:
    @app.get("/console/login")
    async def show_login() -> Response:
        return _html(form.replace("{{problem}}", ""))

    @app.post("/console/login")
    async def login(request: Request) -> Response:
        try:
            cookie = await sessions.begin(await _key_in(request))
        except ApiError as error:
            return _html(form.replace("{{problem}}", _PROBLEMS.get(error.code, _AWAY)), error.status)
        answer = RedirectResponse("/console", 303, _HEADERS)
        is_secure = request.headers.get("x-forwarded-proto") == "https"
        answer.set_cookie(COOKIE, cookie, LASTS_S, path="/console", secure=is_secure, httponly=True, samesite="strict")
        return answer

    @app.post("/console/logout")
    async def logout(request: Request) -> Response:
        if not sessions.is_token(_cookie(request), request.headers.get("x-kvgate-csrf", "")):
            raise ApiError(403, "invalid_token", "x-kvgate-csrf: reload the page, and try again.")
        answer = Response(status_code=204, headers=_HEADERS)
        answer.delete_cookie(COOKIE, path="/console", httponly=True, samesite="strict")
        return answer


_AWAY = "Redis does not answer, and it has the secret of the sessions. Try again shortly."
_PROBLEMS = {
    "missing_api_key": "Enter an admin key.",
    "invalid_api_key": "This key is not known here.",
    "admin_key_required": "This is no admin key: it has no `admin: true` in security.api_keys.",
    "request_too_large": "This is too long for a key.",
}


async def _live(cluster: ClusterView, decisions: Decisions, is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The cluster twice a second as the event `cluster`; records of requests as `decisions`; `dropped` with how many of
    these were left out."""
    seen: dict[str, Any] = {}
    with decisions.watching({}) as viewer:
        while not is_over():
            events = []
            if (now := await cluster.look()) is not seen:
                seen = now
                events.append(b"event: cluster\ndata: %b\n\n" % orjson.dumps(seen))
            records, dropped = viewer.take()
            if records:
                events.append(b"event: decisions\ndata: %b\n\n" % orjson.dumps(records))
            if dropped:
                events.append(b"event: dropped\ndata: %d\n\n" % dropped)
            if events:
                yield b"".join(events)
            await asyncio.sleep(_TICK_S)


async def _key_in(request: Request) -> str:
    """The key in a form of one field."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_FORM_BYTES:
            raise ApiError(413, "request_too_large", "key: it is too long.")
    return parse_qs(body.decode("latin-1"), encoding="latin-1").get("key", [""])[0].strip()


def _cookie(request: Request) -> str:
    return request.cookies.get(COOKIE, "")


def _html(text: str, status: int = 200) -> Response:
    return Response(text, status, _HEADERS, "text/html")
