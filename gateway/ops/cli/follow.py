"""The command that keeps the map true: `kvgate agent` beside a replica."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from gateway.ops.cli.config import named_by_option, of_options
from gateway.ops.cli.imports import long_lived_imports
from gateway.ops.cli.options import REDIS_NAMESPACE, REDIS_URL
from gateway.ops.errors import CommandError

if TYPE_CHECKING:
    from gateway.ops.followed import FollowedReplica
    from gateway.settings.gateway_settings import GatewaySettings

# The variables of the environment that agents take, as gateways do.
_VARIABLES = ("KVGATE_REPLICA_API_KEY", "KVGATE_REPLICA_TLS_CERTIFICATE", "KVGATE_REPLICA_TLS_KEY")


def agent(
    replica: Annotated[str, Option(help="The replica's id, as the gateways know it; in Kubernetes, its pod's name.")],
    url: Annotated[str, Option(help="Its base URL.")],
    redis_url: Annotated[str, REDIS_URL] = "redis://127.0.0.1:6379/0",
    redis_namespace: Annotated[str, REDIS_NAMESPACE] = "",
    events: Annotated[str, Option(help="Where it publishes KV events. Without this, its engine is asked.")] = "",
    replay: Annotated[str, Option(help="Where it replays them.")] = "",
    lmcache: Annotated[str, Option(help="The HTTP address of the LMCache server beside it.")] = "",
    dp_rank: Annotated[int | None, Option(min=0, help="Its rank in a data-parallel server.")] = None,
    control_port: Annotated[int, Option(min=0, max=65535, help="The port of GET /drain; 0: none.")] = 0,
    log_format: Annotated[Literal["json", "console"], Option(help="The format of log lines.")] = "json",
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

    With --control-port, a GET of /drain with the header x-kvgate-drain takes the
    replica out of service gently, and is answered when its last request is over. Let only the host's own preStop
    hooks reach this port.

    \b
    Examples:
      kvgate agent --replica r0 --url http://127.0.0.1:8000
      kvgate agent --replica r0 --url http://127.0.0.1:8000 \\
          --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558
      kvgate agent --replica r0 --url http://127.0.0.1:8000 \\
          --lmcache http://127.0.0.1:5580
    """
    env = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    with long_lived_imports():
        from gateway.logs import configure
        from gateway.ops.followed import FollowedReplica
        from gateway.settings.base import short_id
        from gateway.settings.config_file import build

        told = {"id": short_id(replica), "url": url, "dp_rank": dp_rank, "events": events, "replay": replay}
        with named_by_option():
            settings = of_options(redis_url, redis_namespace, {"format": log_format}, env)
            followed = build(FollowedReplica, told | {"lmcache": lmcache}, {}, {})
        configure(settings.log, agent=followed.id)
        work = _follow(settings, followed, control_port)
    try:
        _until_stopped(work)
    except OSError as error:
        raise CommandError(f"--control-port {control_port}: {error.strerror or error}") from None


def _follow(settings: GatewaySettings, replica: FollowedReplica, control_port: int) -> Coroutine[Any, Any, None]:
    """What runs until the agent is stopped."""
    from coordinator.agent.agent import Agent
    from coordinator.agent.control_client import ControlClient
    from coordinator.agent.http_engine import HttpEngine
    from gateway.ops.agent_control import control_port as listening
    from gateway.ops.followed import replica_certificate
    from gateway.tasks import Tasks

    key, certificate = settings.security.replica_api_key, replica_certificate(settings)
    redis = settings.redis

    async def run() -> None:
        tasks = Tasks()
        secret, tls = key.get_secret_value() if key else None, certificate.first if certificate else None
        client = ControlClient(secret, tls)
        if certificate is not None:
            tasks.keep(certificate.run, "replica_tls")
        try:
            addresses = replica.events, replica.replay, replica.lmcache
            engine = HttpEngine(client, replica.url, replica.dp_rank, *addresses)
            followed = Agent(redis.url, replica.id, engine, redis.namespace)
            async with listening(followed, control_port):
                await followed.run()
        finally:
            await tasks.close()
            await client.close()

    return run()


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
