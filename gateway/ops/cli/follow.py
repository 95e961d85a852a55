"""The command that keeps the map true: `kvgate agent` beside a replica."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gateway.ops.cli.config import replica_certificate
from gateway.ops.cli.errors import CommandError
from gateway.ops.cli.imports import long_lived_imports

if TYPE_CHECKING:
    from gateway.settings.gateway_settings import GatewaySettings

# The option behind each field of the settings.
_OPTIONS = {
    "redis.url": "--redis-url",
    "redis.namespace": "--redis-namespace",
    "replicas[0].id": "--replica",
    "replicas[0].url": "--url",
}

# The variables of the environment that agents take, as gateways do.
_VARIABLES = ("KVGATE_REPLICA_API_KEY", "KVGATE_REPLICA_TLS_CERTIFICATE", "KVGATE_REPLICA_TLS_KEY")

RedisUrl = Annotated[
    str, typer.Option(envvar="KVGATE_REDIS_URL", help="The Redis that gateways share; rediss:// for TLS.")
]
RedisNamespace = Annotated[
    str,
    typer.Option(
        envvar="KVGATE_REDIS_NAMESPACE",
        metavar="NAME",
        help="The gateways' redis.namespace, if several clusters share the Redis.",
    ),
]
ReplicaId = Annotated[
    str,
    typer.Option(
        "--replica", help="The replica's id, as the gateways know it; its pod's name if they find it in Kubernetes."
    ),
]
ReplicaUrl = Annotated[str, typer.Option("--url", help="The replica's base URL.")]
Events = Annotated[
    str,
    typer.Option(
        help="The address of the replica's KV events, tcp:// or ipc://. Without it, the agent asks the engine."
    ),
]
Replay = Annotated[str, typer.Option(help="The address at which the replica replays its KV events.")]
Lmcache = Annotated[str, typer.Option("--lmcache", help="The HTTP address of the LMCache server beside the replica.")]
DpRank = Annotated[int | None, typer.Option(min=0, help="The replica's rank in a data-parallel server.")]
LogFormat = Annotated[Literal["json", "console"], typer.Option(help="The format of log lines.")]
ControlPort = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="Port at which GET /drain (header x-kvgate-drain) drains the replica, for a preStop hook; 0: none.",
    ),
]


def agent(
    replica: ReplicaId,
    url: ReplicaUrl,
    redis_url: RedisUrl = "redis://127.0.0.1:6379/0",
    redis_namespace: RedisNamespace = "",
    events: Events = "",
    replay: Replay = "",
    lmcache: Lmcache = "",
    dp_rank: DpRank = None,
    control_port: ControlPort = 0,
    log_format: LogFormat = "json",
) -> None:
    """Follow one replica's KV events and tell the map what it holds; run it beside the replica.

    vLLM has to publish events: --kv-events-config with publisher zmq and a
    replay_endpoint. Events contain prompt tokens: let only the agent reach
    these ports. Without events the replica stays "degraded": its ownership is
    predicted, not confirmed. KVGATE_REPLICA_API_KEY is sent to the replica. If
    that wants a client's certificate: KVGATE_REPLICA_TLS_CERTIFICATE and
    KVGATE_REPLICA_TLS_KEY name the files.

    With --lmcache, a prompt that no GPU holds, but that LMCache has in the same
    Redis, counts with the cost of loading it. Any replica can load it, so the
    least loaded replica does.

    With --control-port, a GET of /drain takes the replica out of service gently,
    and is answered when its last request is over. Let only the host's own preStop
    hooks reach this port.

    \b
    Examples:
      kvgate agent --replica r0 --url http://127.0.0.1:8000
      kvgate agent --replica r0 --url http://127.0.0.1:8000 \\
          --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558
      kvgate agent --replica r0 --url http://127.0.0.1:8000 \\
          --lmcache http://127.0.0.1:5580
    """
    with long_lived_imports():
        from coordinator.agent.agent import Agent
        from coordinator.agent.control_client import ControlClient
        from coordinator.agent.http_engine import HttpEngine
        from gateway.logs import configure
        from gateway.ops.agent_control import control_port as listening
        from gateway.settings.base import short_id
        from gateway.tasks import Tasks

    replica = short_id(replica)
    settings = _checked(redis_url, redis_namespace, log_format, replicas=[{"id": replica, "url": url}])
    _check_endpoints(events, replay)
    _check_lmcache(lmcache)
    configure(settings.log, agent=replica)
    key, certificate = settings.security.replica_api_key, replica_certificate(settings)

    async def run() -> None:
        tasks = Tasks()
        secret, tls = key.get_secret_value() if key else None, certificate.first if certificate else None
        client = ControlClient(secret, tls)
        if certificate is not None:
            tasks.keep(certificate.run, "replica_tls")
        try:
            engine = HttpEngine(client, settings.replicas[0].url, dp_rank, events, replay, lmcache.rstrip("/"))
            followed = Agent(redis_url, replica, engine, redis_namespace)
            async with listening(followed, control_port):
                await followed.run()
        finally:
            await tasks.close()
            await client.close()

    try:
        _until_stopped(run())
    except OSError as error:
        raise CommandError(f"--control-port {control_port}: {error.strerror or error}") from None


def _checked(redis_url: str, redis_namespace: str, log_format: str, **sections: Any) -> GatewaySettings:
    """The options as a gateway's settings, which check them."""
    from gateway.settings.config_file import SettingsError
    from gateway.settings.gateway_settings import build_settings

    key = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    try:
        redis = {"url": redis_url, "namespace": redis_namespace}
        return build_settings({"redis": redis, "log": {"format": log_format}, **sections}, key)
    except SettingsError as error:
        fields = (problem.partition(": ") for problem in error.problems)
        raise CommandError("; ".join(f"{_OPTIONS.get(field, field)}: {what}" for field, _, what in fields)) from None


def _check_endpoints(events: str, replay: str) -> None:
    from gateway.ops.local.plan import ENDPOINT, is_endpoint

    for option, endpoint in (("--events", events), ("--replay", replay)):
        if endpoint and not is_endpoint(endpoint):
            raise CommandError(f"{option}: is {endpoint!r}; must be {ENDPOINT}")
    if replay and not events:
        raise CommandError("--replay: needs --events; without either, both are asked of the engine")


def _check_lmcache(lmcache: str) -> None:
    from gateway.ops.local.plan import is_http

    if lmcache and not is_http(lmcache):
        raise CommandError(f"--lmcache: is {lmcache!r}; must be its HTTP server's base, like http://127.0.0.1:8080")


def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run until SIGTERM or Ctrl-C, then let the work end in order."""

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await work
        except asyncio.CancelledError:
            return

    import uvloop

    uvloop.run(run())
