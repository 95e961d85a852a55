"""Commands for a local cluster: up, down, status."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from gateway.ops.cli.options import DEFAULT_STATE_DIR, AsJson, StateDir, usable_key
from gateway.ops.errors import CommandError
from gateway.settings.policies import DEFAULT_POLICY, POLICIES

_DEFAULT_SIMULATED = 2
_POLICIES = ", ".join(f"{name} ({meaning})" for name, meaning in POLICIES.items())


# The options of `up` that need more than a line.
RedisUrl = Annotated[
    str | None,
    Option(metavar="URL", help="The Redis that gateways share; rediss:// for TLS.", show_default="an embedded one"),
]
RedisNamespace = Annotated[
    str | None,
    Option(metavar="NAME", help="The gateways' redis.namespace.", show_default="that of --config, or none"),
]
Policy = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help=f"How a replica is chosen: {_POLICIES}.",
        show_default=f"that of --config, or {DEFAULT_POLICY}",
    ),
]
Config = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help="A gateway's YAML. Everything in it is used except id, addresses, Redis URL and replicas. At the end, "
        "answers have 2.5 s to finish, unless its timeouts.grace_s says something else.",
    ),
]
FrontedReplicas = Annotated[
    list[str] | None,
    Option(
        metavar="URL|id=…,url=…",
        help="Use this server instead of simulated replicas; repeatable. Without id=, it is r0, r1, … by its place. "
        "vLLM before 0.32 does not say where it publishes KV events: add events=tcp://host:port and "
        "replay=tcp://host:port. If an LMCache server runs beside it, add lmcache=http://host:port.",
    ),
]


def up(
    gateways: Annotated[int, Option(min=1, max=64, help="Gateways to start.")] = 2,
    replicas: Annotated[
        int | None, Option(min=1, max=256, help="Simulated replicas to start.", show_default=str(_DEFAULT_SIMULATED))
    ] = None,
    port: Annotated[int, Option(min=1, max=65535, help="The port that all gateways share.")] = 8080,
    redis_url: RedisUrl = None,
    redis_namespace: RedisNamespace = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    detach: Annotated[
        bool, Option("--detach", help="Return once it can serve, and leave it running (see kvgate down).")
    ] = False,
    policy: Policy = None,
    speed: Annotated[float, Option(min=0, help="Divides every simulated time; 0 means no delays at all.")] = 1.0,
    config: Config = None,
    demo: Annotated[bool, Option("--demo/--no-demo", help="Send the first requests, unless --detach is given.")] = True,
    replica: FrontedReplicas = None,
) -> None:
    """Start a cluster on this machine: Redis, replicas and gateways behind one shared address.

    Each replica that publishes KV events gets an agent, which reports to the map
    what the replica holds. Once all can serve, kvgate sends a text request and an
    image request, and shows where they went and why. It runs until Ctrl-C; then it
    stops everything within 5 seconds. A process that dies earlier is reported, and
    not restarted.

    \b
    Examples:
      kvgate up
      kvgate up --gateways 4 --replicas 3 --port 8090 --state-dir .kvgate-8090
      kvgate up --detach && kvgate status && kvgate down
      kvgate up --redis-url redis://127.0.0.1:6379
      kvgate up --replica http://gpu0:8000 --replica http://gpu1:8000
    """
    from gateway.ops.cli.config import contradictions_in, load
    from gateway.ops.cli.up import run
    from gateway.ops.local.plan import Plan, parse_fronted

    if replica and replicas is not None:
        raise CommandError("--replicas counts simulated replicas and --replica names real ones: give one of the two")
    usable_key(os.environ.get("KVGATE_API_KEY"))
    fronted = tuple(parse_fronted(text, position) for position, text in enumerate(replica or ()))
    plan = Plan(
        state_dir=state_dir.resolve(),
        gateways=gateways,
        simulated=0 if fronted else (replicas or _DEFAULT_SIMULATED),
        fronted=fronted,
        port=port,
        redis_url=redis_url,
        redis_namespace=redis_namespace,
        policy=policy,
        speed=speed,
        base_config=config,
        detach=detach,
    )
    if config is not None:
        with suppress(CommandError):  # the gateways' own settings are told below
            for warning in contradictions_in(load(config)):
                typer.echo(f"warning: {warning}", err=True)
    asyncio.run(run(plan, os.environ, with_demo=demo))


def down(state_dir: StateDir = DEFAULT_STATE_DIR) -> None:
    """Stop the cluster of a state directory. If none runs there, do nothing.

    Only processes that the cluster started are signalled. They have 5 seconds in
    all to finish; those that still run then are killed, and named.

    \b
    Examples:
      kvgate down
      kvgate down --state-dir .kvgate-8090
    """
    from gateway.ops.local.cluster_status import stop_cluster

    stopped = asyncio.run(stop_cluster(state_dir.resolve()))
    typer.echo(stopped if stopped.running else f"nothing runs in {state_dir}")


def status(
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Show a cluster's processes, whether each can serve, and the state of its store.

    The exit code is 1 when anything is down or no cluster is up.

    \b
    Examples:
      kvgate status
      kvgate status --state-dir .kvgate-8090 --json
    """
    from dataclasses import asdict

    from gateway.ops.local.cluster_status import cluster_status

    members = asyncio.run(cluster_status(state_dir.resolve()))
    if as_json:
        typer.echo(json.dumps([asdict(member) for member in members], indent=2))
    else:
        from gateway.ops.cli.tables import print_status

        print_status(members)
    if any(member.state != "ready" for member in members):
        raise typer.Exit(1)
