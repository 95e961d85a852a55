"""The replica's HTTP server: `build_app` for tests, `run` for a whole process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvloop
from aiohttp import web

from gateway.simulator import control_api, messages_api, openai_api, pooling_api, protocol, responses_api
from gateway.simulator.call import control, inference
from gateway.simulator.errors import not_found
from gateway.simulator.protocol import parser
from gateway.simulator.replica import SimReplica
from gateway.simulator.settings import SimSettings

_MAX_BODY_BYTES = 512 * 2**20
_DRAIN_S = 3.0
_KEEP_ALIVE_S = 5.0
"""Idle connections are closed after this time, as by vLLM's uvicorn."""

_UNREAD = parser(dict[str, Any])
"""For endpoints that read their few fields themselves (gateway/simulator/fields.py)."""
_INFERENCE = {
    "/v1/chat/completions": (openai_api.chat_completions, parser(protocol.ChatRequest)),
    "/v1/completions": (openai_api.completions, parser(protocol.CompletionRequest)),
    "/v1/responses": (responses_api.create_response, parser(protocol.ResponsesRequest)),
    "/v1/embeddings": (pooling_api.embeddings, _UNREAD),
    "/v1/score": (pooling_api.score, _UNREAD),
    "/score": (pooling_api.score, _UNREAD),
    "/v1/rerank": (pooling_api.rerank, _UNREAD),
    "/rerank": (pooling_api.rerank, _UNREAD),
    "/tokenize": (pooling_api.tokenize, _UNREAD),
    "/v1/messages": (messages_api.messages, parser(protocol.MessagesRequest)),
    "/v1/messages/count_tokens": (messages_api.count_tokens, parser(protocol.CountTokensRequest)),
}
_TOLD: dict[str, Callable[[SimReplica], object]] = {
    "/v1/models": control_api.models,
    "/version": lambda replica: {"version": replica.settings.vllm_version},
    "/kv_event_sources": control_api.kv_event_sources,
    "/is_paused": lambda replica: {"is_paused": replica.sleep.is_paused},
    "/lmcache/status": control_api.lmcache_status,
    "/lmcache/config": control_api.lmcache_config,
    "/sim/state": lambda replica: replica.state(),
    "/sim/load": control_api.load,
}
"""What is told to a GET as JSON."""
_CONTROL = (
    ("GET", "/v1/responses/{response_id}", responses_api.get_response),
    ("POST", "/v1/responses/{response_id}/cancel", responses_api.cancel_response),
    ("GET", "/health", control_api.health),
    ("*", "/ping", control_api.health),
    ("GET", "/metrics", control_api.metrics),
    ("GET", "/v1/pd_role", control_api.pd_role),
    ("POST", "/v1/pd_role", control_api.pd_role),
    ("GET", "/lmcache/metrics", control_api.lmcache_metrics),
    ("POST", "/v1/load_lora_adapter", control_api.load_lora_adapter),
    ("POST", "/v1/unload_lora_adapter", control_api.unload_lora_adapter),
    ("POST", "/detokenize", control_api.detokenize),
    ("POST", "/reset_prefix_cache", control_api.reset_prefix_cache),
    ("POST", "/sleep", control_api.sleep),
    ("POST", "/wake_up", control_api.wake_up),
    ("GET", "/is_sleeping", control_api.is_sleeping),
    ("POST", "/pause", control_api.pause),
    ("POST", "/resume", control_api.resume),
    ("POST", "/abort_requests", control_api.abort_requests),
    ("POST", "/sim/reset_cache", control_api.reset_prefix_cache),
    ("POST", "/sim/fail", control_api.fail),
    ("POST", "/sim/fetch", control_api.fetch),
    ("POST", "/sim/push", control_api.push),
    ("GET", "/query", control_api.query),
)


def build_app(settings: SimSettings) -> web.Application:
    """One replica as an application. Serve it with `serving`, or with an AppRunner that has handler_cancellation=True.
    Without that, a client that goes away does not abort its request."""
    replica = SimReplica(settings)

    async def engines(_: web.Application) -> AsyncIterator[None]:
        try:
            replica.start()
            yield
        finally:
            await replica.close()

    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    for path, (handler, parse) in _INFERENCE.items():
        app.router.add_post(path, inference(replica, handler, parse))
    for path, told in _TOLD.items():
        app.router.add_get(path, control(replica, partial(_as_json, told)))
    for method, path, control_handler in _CONTROL:
        app.router.add_route(method, path, control(replica, control_handler))
    app.router.add_route("*", "/{path:.*}", control(replica, _not_found))
    app.cleanup_ctx.append(engines)
    return app


@asynccontextmanager
async def serving(settings: SimSettings) -> AsyncIterator[int]:
    """Serve one replica on the running loop, and yield its port. At the end, running requests get 3 s to finish."""
    runner = web.AppRunner(
        build_app(settings),
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEP_ALIVE_S,
        shutdown_timeout=_DRAIN_S,
    )
    try:
        await runner.setup()
        await web.TCPSite(runner, settings.host, settings.port).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def run(settings: SimSettings, ready: Callable[[int], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Calls `ready` with the port as soon as it accepts connections."""
    uvloop.run(_serve_until_told(settings, ready))


async def _serve_until_told(settings: SimSettings, ready: Callable[[int], None] | None) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    async with serving(settings) as port:
        if ready is not None:
            ready(port)
        await told.wait()


async def _as_json(told: Callable[[SimReplica], object], replica: SimReplica, _: web.Request) -> web.StreamResponse:
    return web.json_response(told(replica))


async def _not_found(_: SimReplica, __: web.Request) -> web.StreamResponse:
    raise not_found()
