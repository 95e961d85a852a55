"""The options of `kvgate up`, and the configuration that each of its gateways gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from gateway.ops.local.errors import ClusterError
from gateway.settings.certificate_settings import CertificateSettings
from gateway.settings.config_file import SettingsError
from gateway.settings.gateway_settings import build_settings, load_settings
from gateway.tls import BadCertificate, Certificate, towards_replicas

HOST = "127.0.0.1"
# `kvgate up` stops everything within 5 s. In that time, gateways must finish their streams.
_GRACE_S = 2.5


@dataclass(frozen=True)
class FrontedReplica:
    """A server that `--replica` names: the cluster does not start it, but puts its gateways in front of it."""

    id: str
    url: str
    events: str = ""
    replay: str = ""
    lmcache: str = ""
    dp_rank: str = ""


@dataclass(frozen=True)
class Plan:
    """A cluster to start. With `fronted` servers, no replica is simulated."""

    state_dir: Path
    gateways: int = 2
    simulated: int = 2
    fronted: tuple[FrontedReplica, ...] = ()
    port: int = 8080
    redis_url: str | None = None
    redis_namespace: str | None = None
    policy: str | None = None
    speed: float = 1.0
    base_config: Path | None = None
    detach: bool = False


_FRONTED_FIELDS = frozenset({"id", "url", "events", "replay", "lmcache", "dp_rank"})


def parse_fronted(text: str) -> FrontedReplica:
    """Parse `id=r0,url=http://host:port[,events=tcp://…][,replay=tcp://…][,lmcache=http://…]`.

    `events` and `replay` are the engine's addresses for KV events, needed if it does not return them itself; `lmcache`
    is the HTTP address of the LMCache server beside it; `dp_rank` is its rank, if several share the url.
    """
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in _FRONTED_FIELDS or name in fields:
            raise ClusterError(
                f"--replica {text}: {part!r} is not understood; write id=r0,url=http://host:port"
                "[,events=tcp://host:port][,replay=tcp://host:port][,lmcache=http://host:port]"
                "[,dp_rank=0]"
            )
        fields[name] = value
    for name in ("id", "url"):
        if not fields.get(name):
            raise ClusterError(f"--replica {text}: {name}=… is missing; write id=r0,url=http://host:port")
    for name in ("events", "replay"):
        if name in fields and not is_endpoint(fields[name]):
            raise ClusterError(f"--replica {text}: {name} must be {ENDPOINT}")
    if "replay" in fields and "events" not in fields:
        raise ClusterError(f"--replica {text}: replay=… needs events=…")
    if "lmcache" in fields and not is_http(fields["lmcache"]):
        raise ClusterError(f"--replica {text}: lmcache must be the base of its HTTP server, http://host:port")
    if "dp_rank" in fields and re.fullmatch(r"\d{1,9}", fields["dp_rank"], re.ASCII) is None:
        raise ClusterError(f"--replica {text}: dp_rank must be the replica's rank in a data-parallel server: 0, 1, …")
    return FrontedReplica(**{name: value.rstrip("/") for name, value in fields.items()})


ENDPOINT = "tcp://host:port, or ipc:///path of a socket"


def is_http(url: str) -> bool:
    """Whether this is the base URL of an HTTP server."""
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def is_endpoint(url: str) -> bool:
    """Whether ZeroMQ can connect to it: whether it looks like ENDPOINT says."""
    try:
        parts = urlsplit(url)
        is_socket = parts.scheme == "ipc" and not parts.netloc and len(parts.path) > 1
        return is_socket or (parts.scheme == "tcp" and bool(parts.hostname) and parts.port is not None)
    except ValueError:
        return False


def base_config(plan: Plan, env: Mapping[str, str]) -> dict[str, Any]:
    """The checked content of the plan's base file; empty if there is no file."""
    if plan.base_config is None:
        return {}
    try:
        settings = load_settings(plan.base_config, env)
    except SettingsError as error:
        raise ClusterError(f"{plan.base_config}: {error.listed()}") from None
    if settings.tls is not None:
        raise ClusterError(
            f"{plan.base_config}: tls: kvgate up serves plain HTTP, on this machine only; leave tls out, or start each "
            "gateway with kvgate gateway --config FILE"
        )
    loaded: dict[str, Any] = yaml.safe_load(plan.base_config.read_text(encoding="utf-8")) or {}
    return loaded


def not_used(plan: Plan, base: Mapping[str, Any]) -> list[str]:
    """The fields of the base that do not count, because options decide; each with the option that was not given."""
    url = base.get("redis", {}).get("url")
    has_given_port = plan.port != Plan.port
    fields = {
        "replicas (--replica)": bool(base.get("replicas")) and not plan.fronted,
        "port (--port)": not has_given_port and base.get("port", plan.port) != plan.port,
        "redis.url (--redis-url)": url is not None and plan.redis_url is None,
    }
    return [field for field, is_left_out in fields.items() if is_left_out]


def gateway_config(
    plan: Plan,
    base: Mapping[str, Any],
    name: str,
    port: int,
    redis_url: str,
    replicas: list[FrontedReplica],
    env: Mapping[str, str],
) -> str:
    """The YAML of gateway `name`: `base`, overridden by everything that this cluster decides.

    The gateway listens on the loopback address only.
    """
    merged: dict[str, Any] = {
        **base,
        "host": HOST,
        "id": name,
        "port": port,
        "shared_port": plan.port,
        "redis": {**base.get("redis", {}), "url": redis_url},
        "replicas": [
            {"id": replica.id, "url": replica.url} | ({"dp_rank": int(replica.dp_rank)} if replica.dp_rank else {})
            for replica in replicas
        ],
        "timeouts": {"grace_s": _GRACE_S, **base.get("timeouts", {})},
    }
    if plan.redis_namespace is not None:
        merged["redis"]["namespace"] = plan.redis_namespace
    if plan.policy is not None:
        merged["policy"] = {**base.get("policy", {}), "name": plan.policy}
    try:
        build_settings(merged, env)
    except SettingsError as error:
        raise ClusterError("; ".join(_by_option(problem, plan) for problem in error.problems)) from None
    return yaml.safe_dump(merged, sort_keys=False)


def _by_option(problem: str, plan: Plan) -> str:
    """The `problem` with its option in place of its field, if an option filled that field."""
    field, _, what = problem.partition(": ")
    fronted = re.match(r"replicas\[(\d+)\]\.", field)
    if fronted and plan.fronted:
        return f"--replica id={plan.fronted[int(fronted[1])].id},…: {field[fronted.end() :]} {what}"
    options: dict[str, tuple[str, object]] = {
        "redis.url": ("--redis-url", plan.redis_url),
        "redis.namespace": ("--redis-namespace", plan.redis_namespace),
        "policy.name": ("--policy", plan.policy),
        "replicas": ("--replica", plan.fronted),
    }
    option, given = options.get(field, ("", None))
    return f"{option}: {what}" if given else problem


def namespace_of(plan: Plan, base: Mapping[str, Any]) -> str:
    """The cluster's redis.namespace; empty for none."""
    named: str | None = plan.redis_namespace
    return named if named is not None else base.get("redis", {}).get("namespace") or ""


def agent_secrets(base: Mapping[str, Any], redis_url: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agent. Other users cannot read it there: the URL may hold a password, the key is one."""
    key = env.get("KVGATE_REPLICA_API_KEY") or base.get("security", {}).get("replica_api_key") or ""
    secrets = {"KVGATE_REDIS_URL": redis_url, "KVGATE_REPLICA_API_KEY": key}
    if (shown := _replica_tls(base, env)) is not None:
        secrets |= {"KVGATE_REPLICA_TLS_CERTIFICATE": shown.certificate, "KVGATE_REPLICA_TLS_KEY": shown.key}
    return secrets


def certificate_for_replicas(base: Mapping[str, Any], env: Mapping[str, str]) -> Certificate | None:
    """What replicas see of the cluster. Raises ClusterError."""
    try:
        return towards_replicas(_replica_tls(base, env))
    except BadCertificate as error:
        raise ClusterError(str(error)) from None


def _replica_tls(base: Mapping[str, Any], env: Mapping[str, str]) -> CertificateSettings | None:
    named = {"replica_tls": base["replica_tls"]} if base.get("replica_tls") else {}
    return build_settings(named, env).replica_tls
