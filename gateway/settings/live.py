"""What a gateway takes of a configuration that changes while it runs. Pure."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from gateway.settings.base import Section
from gateway.settings.config_file import SettingsError
from gateway.settings.gateway_settings import GatewaySettings

LIVE = (
    *(
        "replicas",
        "discovery",
        "models",
        "tenants",
        "limits",
        "timeouts",
        "retries",
        "resume",
        "hedge",
        "pairs",
        "health",
        "policy",
        "billing",
    ),
    *("queue.max_wait_s", "queue.prefill_tokens_per_s", "queue.wait_s", "queue.starve_s", "queue.max_waiting"),
    *("queue.max_waiting_per_tenant", "queue.engine_priority", "queue.keep_alive_s", "queue.hold_s", "queue.models"),
    *("security.api_keys", "security.expose_decisions", "security.allow_priority", "security.allow_origins"),
    *("security.hosts", "security.image_hosts", "security.media_folder"),
    *("security.allowed_paths", "security.denied_paths"),
    *("decisions.max_bytes", "decisions.cost_share", "log.level", "log.access_log"),
)
"""The sections and fields that a running gateway changes. All others need a restart."""
_KEYS = "security.api_keys"


class Change(NamedTuple):
    """From one configuration to another."""

    settings: GatewaySettings
    """Those to use from now on: the running ones, with the live fields of the new ones."""
    taken: list[str]
    """The live fields that differ."""
    left: list[str]
    """The other fields that differ. They need a restart."""


def change(running: GatewaySettings, wanted: GatewaySettings) -> Change:
    """Raises SettingsError if the live fields of the wanted settings do not fit the running ones."""
    differ = [path for path in every_field(GatewaySettings) if _at(running, path) != _at(wanted, path)]
    opens = bool(running.security.api_keys) != bool(wanted.security.api_keys)  # it changes how every body is read
    taken = [path for path in differ if is_live(path) and not (opens and path == _KEYS)]
    if not taken:
        return Change(running, [], differ)
    told, new = (settings.model_dump(exclude_unset=True) for settings in (running, wanted))  # checks look for defaults
    for path in taken:
        section, _, field = path.partition(".")
        if field:
            _copy(field, new.get(section, {}), told.setdefault(section, {}))
        else:
            _copy(section, new, told)
    try:
        settings = GatewaySettings.model_validate(told)
    except ValidationError as error:
        mistakes = [str(detail["ctx"]["error"]) if "ctx" in detail else detail["msg"] for detail in error.errors()]
        raise SettingsError([f"{mistake} (a restart would take the whole file)" for mistake in mistakes]) from None
    return Change(settings, taken, [path for path in differ if path not in taken])


def is_live(path: str) -> bool:
    """Whether a running gateway changes this field."""
    return path in LIVE or path.partition(".")[0] in LIVE


def _copy(field: str, new: dict[str, Any], told: dict[str, Any]) -> None:
    told.pop(field, None)
    if field in new:
        told[field] = new[field]


def every_field(model: type[BaseModel]) -> list[str]:
    """Every field of the file: of a section, each of its own."""
    paths = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            paths += [f"{name}.{inner}" for inner in kind.model_fields]
        else:
            paths.append(name)
    return paths


def _at(settings: GatewaySettings, path: str) -> Any:
    return attrgetter(path)(settings)
