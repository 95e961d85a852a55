"""The options of `kvgate up`, and the configuration that each of its gateways gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gateway.ops.errors import CommandError
from gateway.ops.followed import FollowedReplica, is_http
from gateway.settings.base import BOOTSTRAP_PORT_LABEL, ROLE_LABEL
from gateway.settings.config_file import SettingsError, build, merged
from gateway.settings.gateway_settings import GatewaySettings, build_settings, load_settings

HOST = "127.0.0.1"
# `kvgate up` stops everything within 5 s. In that time, gateways must finish their streams.
_GRACE_S = 2.5


@dataclass(frozen=True)
class Plan:
    """A cluster to start. With `fronted` servers, no replica is simulated."""

    state_dir: Path
    gateways: int = 2
    simulated: int = 2
    fronted: tuple[FollowedReplica, ...] = ()
    port: int = 8080
    redis_url: str | None = None
    redis_namespace: str | None = None
    policy: str | None = None
    speed: float = 1.0
    base_config: Path | None = None
    detach: bool = False


_FORM = (
    "URL, or id=r0,url=http://host:port[,events=tcp://host:port][,replay=…][,lmcache=…][,dp_rank=0][,role=prefill]"
    "[,bootstrap_port=8998]"
    "[,bootstrap_port=8998]"
)
_LABELS = {"role": ROLE_LABEL, "bootstrap_port": BOOTSTRAP_PORT_LABEL}


_OF_REPLICA = {"id", "url", "dp_rank", "labels"}


def parse_fronted(text: str, position: int) -> FollowedReplica:
    """Parse `URL` or `id=r0,url=URL[,events=tcp://…]…`. Without an id, the replica is named by its position."""
    first, *others = text.split(",")
    parts = [part.partition("=") for part in (f"url={first}" if is_http(first) else first, *others)]
    fields = {"id": f"r{position}"} | {name: value for name, _, value in parts}
    if not all(equals for _, equals, _ in parts) or len({name for name, _, _ in parts}) < len(parts):
        raise CommandError(f"--replica {text}: is not understood; write {_FORM}")
    told: dict[str, Any] = {**fields}
    if labels := {label: told.pop(name) for name, label in _LABELS.items() if name in told}:
        told["labels"] = labels
    try:
        return build(FollowedReplica, told, {}, {})
    except SettingsError as error:
        raise CommandError(f"--replica {text}: {'; '.join(error.problems)}") from None


def base_config(plan: Plan, env: Mapping[str, str]) -> dict[str, Any]:
    """The checked content of the plan's base file; empty if there is no file."""
    if plan.base_config is None:
        return {}
    try:
        settings = load_settings(plan.base_config, env)
    except SettingsError as error:
        raise CommandError(f"{plan.base_config}: {error.listed()}") from None
    if settings.tls is not None:
        raise CommandError(
            f"{plan.base_config}: tls: kvgate up serves plain HTTP, on this machine only; leave tls out, or start each "
            "gateway with kvgate gateway --config FILE"
        )
    loaded: dict[str, Any] = yaml.safe_load(plan.base_config.read_text(encoding="utf-8")) or {}
    return loaded


def not_used(plan: Plan, base: Mapping[str, Any]) -> list[str]:
    """The fields of the base that do not count, because options decide; each with its option."""
    url = base.get("redis", {}).get("url")
    has_given_port = plan.port != Plan.port
    fronted = {replica.url for replica in plan.fronted}
    fields = {
        "replicas (--replica)": any(each["url"] not in fronted for each in base.get("replicas") or ()),
        "port (--port)": not has_given_port and base.get("port", plan.port) != plan.port,
        "redis.url (--redis-url)": url is not None and plan.redis_url is None,
    }
    return [field for field, is_left_out in fields.items() if is_left_out]


def wants_records_secret(base: Mapping[str, Any], env: Mapping[str, str]) -> bool:
    """Whether somebody may make keys here, and no secret is given that signs them."""
    security = base.get("security") or {}
    is_given = security.get("records_secret") or env.get("KVGATE_RECORDS_SECRET")
    return not is_given and any(key.get("admin") for key in security.get("api_keys") or [])


def gateway_config(
    plan: Plan,
    base: Mapping[str, Any],
    name: str,
    port: int,
    redis_url: str,
    replicas: list[FollowedReplica],
    env: Mapping[str, str],
    records_secret: str | None = None,
) -> tuple[str, GatewaySettings]:
    """The YAML of gateway `name`, which has everything that this cluster decides, and its settings. The gateway reads
    `base` before it.

    The gateway listens on the loopback address only.
    """
    own: dict[str, Any] = {
        "host": HOST,
        "id": name,
        "port": port,
        "shared_port": plan.port,
        "redis": {"url": redis_url},
        "replicas": [replica.model_dump(include=_OF_REPLICA, exclude_defaults=True) for replica in replicas],
    }
    if "grace_s" not in base.get("timeouts", {}):
        own["timeouts"] = {"grace_s": _GRACE_S}
    if plan.redis_namespace is not None:
        own["redis"]["namespace"] = plan.redis_namespace
    if records_secret is not None:
        own["security"] = {"records_secret": records_secret}
    if plan.policy is not None:
        own["policy"] = {"name": plan.policy}
    try:
        settings = build_settings(merged(dict(base), own), env)
    except SettingsError as error:
        raise CommandError("; ".join(_by_option(problem, plan) for problem in error.problems)) from None
    return yaml.safe_dump(own, sort_keys=False), settings


def _by_option(problem: str, plan: Plan) -> str:
    """The `problem` with its option in place of its field, if an option filled that field."""
    field, _, what = problem.partition(": ")
    options: dict[str, tuple[str, object]] = {
        "redis.url": ("--redis-url", plan.redis_url),
        "redis.namespace": ("--redis-namespace", plan.redis_namespace),
        "policy.name": ("--policy", plan.policy),
        "replicas": ("--replica", plan.fronted),
    }
    option, given = options.get(field, ("", None))
    return f"{option}: {what}" if given else problem


def agent_environment(settings: GatewaySettings) -> dict[str, str]:
    """What an agent reads there. Other users cannot read it: the URL may hold a password, the key is one."""
    key, shown = settings.security.replica_api_key, settings.replica_tls
    told = {
        "KVGATE_REDIS_URL": settings.redis.url,
        "KVGATE_REDIS_NAMESPACE": settings.redis.namespace,
        "KVGATE_REPLICA_API_KEY": key.get_secret_value() if key else "",
    }
    if shown is not None:
        told |= {"KVGATE_REPLICA_TLS_CERTIFICATE": shown.certificate, "KVGATE_REPLICA_TLS_KEY": shown.key}
    return told
