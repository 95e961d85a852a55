"""The command `kvgate doctor`: finds what is wrong with a running cluster."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from gateway.ops.cli.options import DEFAULT_STATE_DIR, REDIS_NAMESPACE, REDIS_URL, ApiKey, AsJson, StateDir
from gateway.ops.cli.printable import printable_lines
from gateway.ops.errors import CommandError, base_url

if TYPE_CHECKING:
    from gateway.doctor.gather import Targets
    from gateway.settings.gateway_settings import GatewaySettings

_COULD_NOT_LOOK = 2


def doctor(
    redis_url: Annotated[str | None, REDIS_URL] = None,
    redis_namespace: Annotated[str | None, REDIS_NAMESPACE] = None,
    gateway: Annotated[
        list[str] | None, Option(metavar="URL", help="A gateway's own address; repeatable. Redis does not list these.")
    ] = None,
    config: Annotated[
        Path | None,
        Option(metavar="FILE", help="A gateway's YAML, for its Redis, replicas, their key and tenants."),
    ] = None,
    lmcache: Annotated[
        list[str] | None, Option(metavar="URL", help="An LMCache server's HTTP address; repeatable.")
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
    timeout_s: Annotated[
        float, Option("--timeout", min=0.1, max=60, help="Seconds that each question may take.")
    ] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Find what is wrong with a running cluster, and say how to fix it.

    For some seconds it asks Redis, every gateway and every replica, and reads the
    agents' reports in Redis: those that you name, or those of the cluster in the state
    directory. It changes nothing. Of a Redis whose user may not call INFO, CONFIG and
    RANDOMKEY, it skips checks. It checks versions, memory and
    eviction, chunks without a TTL, replicas and gateways that differ, events that
    are missing, late or open to everybody, and clocks. It sees what this machine
    sees: run it where a gateway runs. Each finding says why it matters and what to
    type or set; docs/doctor.md lists all findings.

    Exit code: 0 if nothing is wrong; 1 if it printed a finding, even only a warning
    or a Redis that does not answer; 2 if it could not look at anything: a wrong
    option or file, or no cluster. It lists what it could not check.

    \b
    Examples:
      kvgate doctor                     (the cluster of kvgate up)
      kvgate doctor --config gateway.yaml \\
          --gateway http://gw0:8080 --gateway http://gw1:8080
      kvgate doctor --redis-url redis://redis:6379 --gateway http://gw0:8080
      kvgate doctor --json | jq -r '.findings[] | .subject + ": " + .fix'
    """
    from dataclasses import replace

    from gateway.doctor.examine import examine
    from gateway.doctor.gather import gather

    try:
        targets = replace(
            _targets(redis_url, redis_namespace, gateway, config, state_dir),
            lmcache=_urls("--lmcache", lmcache),
            api_key=api_key,
            timeout_s=timeout_s,
        )
    except CommandError as error:
        typer.echo(f"kvgate: {printable_lines(str(error))}", err=True)
        raise typer.Exit(_COULD_NOT_LOOK) from None
    diagnosis = examine(asyncio.run(gather(targets)))
    if as_json:
        typer.echo(json.dumps(diagnosis.told(), indent=2))
    else:
        from gateway.ops.cli.tables import print_diagnosis

        print_diagnosis(diagnosis)
    if diagnosis.findings:
        raise typer.Exit(1)


def _targets(
    redis_url: str | None, namespace: str | None, gateway: list[str] | None, config: Path | None, state_dir: Path
) -> Targets:
    """The servers to ask: those of the options, or else the cluster of the state directory."""
    from gateway.doctor.evidence import Unknown
    from gateway.doctor.gather import Targets
    from gateway.ops.cli.config import load, named_by_option, of_options
    from gateway.ops.local.state_dir import read_cluster
    from gateway.settings.gateway_settings import ReplicaSettings

    gateways = _urls("--gateway", gateway)
    if config is not None:
        settings = load(config)
        url, name = redis_url or settings.redis.url, settings.redis.namespace if namespace is None else namespace
        with named_by_option():
            redis = of_options(url, name).redis
        return Targets(
            redis_url=redis.url,
            namespace=redis.namespace,
            gateways=gateways,
            replicas=tuple(settings.replicas),
            **_configured(settings),
        )
    if redis_url is not None:
        with named_by_option():
            redis = of_options(redis_url, namespace or "").redis
        return Targets(redis.url, redis.namespace, gateways)
    try:
        cluster = read_cluster(state_dir)
    except CommandError:
        if gateways:
            raise CommandError("with --gateway, give --redis-url or --config, too") from None
        raise
    try:
        files = [Path(cluster.base_config)] if cluster.base_config else []
        written = _configured(load([*files, state_dir / f"{cluster.gateways[0].id}.yaml"]))
    except CommandError as error:  # mostly secrets, which were in the environment of `kvgate up` only
        key = os.environ.get("KVGATE_REPLICA_API_KEY")
        written = {"replica_key": key, "settings": Unknown(str(error).replace("\n", " "))}
    return Targets(
        redis_url=cluster.redis_url,
        namespace=cluster.redis_namespace,
        gateways=gateways or tuple(each.url for each in cluster.gateways),
        replicas=tuple(ReplicaSettings(id=each.id, url=each.url) for each in cluster.replicas),
        **written,
    )


def _configured(settings: GatewaySettings) -> dict[str, Any]:
    """What a gateway's settings tell the doctor."""
    from gateway.ops.followed import replica_certificate

    key = settings.security.replica_api_key
    return {
        "replica_key": key.get_secret_value() if key else None,
        "replica_certificate": replica_certificate(settings),
        "settings": settings,
        "discovers": settings.finds_replicas(),
    }


def _urls(option: str, urls: list[str] | None) -> tuple[str, ...]:
    return tuple(base_url(option, url) for url in urls or ())
