"""A gateway's settings: one frozen object, built once at start.

Values come from a YAML file. The environment can override some of them (see OVERRIDES), so that secrets and the facts
of one container stay out of the file. `configs/gateway.yaml` shows every field with its unit and default.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator
from pydantic_core import PydanticKnownError

from coordinator.decision_ring import LEAST_BYTES
from coordinator.errors import StoreDown
from coordinator.redis.address import check_url
from gateway.settings.base import Count, HostName, Labels, Milliseconds, Namespace, Port, Section, Slug, distinct
from gateway.settings.billing_settings import BillingSettings
from gateway.settings.budget_settings import Budgets
from gateway.settings.certificate_settings import CertificateSettings
from gateway.settings.config_file import SettingsError, build, merged, read_file
from gateway.settings.discovery_settings import DiscoverySettings
from gateway.settings.limit_settings import (
    HealthSettings,
    HedgeSettings,
    LimitSettings,
    PairSettings,
    ResumeSettings,
    RetrySettings,
    TimeoutSettings,
)
from gateway.settings.model_settings import ModelSettings, check_models
from gateway.settings.picker_settings import PickerSettings
from gateway.settings.policies import DEFAULT_POLICY, POLICIES
from gateway.settings.queue_settings import NO_LIMITS, AccountLimitSettings, QueueSettings, TenantSettings
from gateway.settings.tracing_settings import TracingSettings

# The field that each variable of the environment overrides.
OVERRIDES = {
    "KVGATE_REDIS_URL": ("redis", "url"),
    "KVGATE_REDIS_NAMESPACE": ("redis", "namespace"),
    "KVGATE_CACHE_SALT_SECRET": ("security", "cache_salt_secret"),
    "KVGATE_RECORDS_SECRET": ("security", "records_secret"),
    "KVGATE_OTHER_RECORDS_SECRET": ("security", "other_records_secret"),
    "KVGATE_REPLICA_API_KEY": ("security", "replica_api_key"),
    "KVGATE_REPLICA_TLS_CERTIFICATE": ("replica_tls", "certificate"),
    "KVGATE_REPLICA_TLS_KEY": ("replica_tls", "key"),
    "KVGATE_ID": ("id",),
}
_OF_ONE_GATEWAY = frozenset({"id", "host", "port", "shared_port", "tls", "replica_tls", "log", "tracing", "picker"})

_ORIGIN = re.compile(r"https?://([a-z0-9_-]+(\.[a-z0-9_-]+)*\.?|\[[0-9a-f:.]+\])(:\d{1,5})?")
_OF_REPLICAS_TOO = {"id", "redis"}
"""Fields that a replica's file has, too."""


def checked_redis_url(url: str) -> str:
    """`url`, if it is a valid address of a store; else raises ValueError."""
    try:
        check_url(url)
    except StoreDown as error:
        raise ValueError(str(error)) from None
    return url


class RedisAddress(Section):
    url: Annotated[str, AfterValidator(checked_redis_url)] = Field(
        default="redis://127.0.0.1:6379/0",
        repr=False,  # may hold a password
    )
    namespace: Namespace = ""


class RedisSettings(RedisAddress):
    budget_ms: Milliseconds = 20


class ReplicaSettings(Section):
    id: Slug
    url: str
    dp_rank: Annotated[int, Field(ge=0)] | None = None
    labels: Labels = Field(default={})

    @field_validator("url")
    @classmethod
    def _is_base_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_valid_port(parts):
            shown = f"{url!r} " if "@" not in url else ""  # it may hold a password
            raise ValueError(f"{shown}is not a server's base URL, like http://10.0.0.7:8000")
        try:
            parts.hostname.encode("idna")
        except UnicodeError:
            raise ValueError("names no host that can be looked up") from None
        if parts.query or parts.fragment or parts.username:
            raise ValueError("must not hold credentials, a query or a fragment")
        if parts.path.rstrip("/").endswith("/v1"):
            raise ValueError("leave /v1 out; the gateway adds the path of each request")
        return url.rstrip("/")

    @property
    def engine(self) -> str:
        """The name of this replica's engine: its server, and its rank if the server has several."""
        return self.url if self.dp_rank is None else f"{self.url} rank {self.dp_rank}"


class PolicySettings(Section):
    name: str = DEFAULT_POLICY
    allow_header: bool = False
    max_active_requests: Count | None = None

    @field_validator("name", mode="before")
    @classmethod
    def _is_a_policy(cls, name: object) -> object:
        if not isinstance(name, str) or name not in POLICIES:
            raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, POLICIES))})
        return name


class ApiKey(Section):
    """A client's API key. Only its SHA-256 is kept (`kvgate hash-key` prints it)."""

    name: Annotated[str, Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tenant: Annotated[str, Field(min_length=1)]
    admin: bool = False
    manages_keys: bool = False
    models: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    limits: AccountLimitSettings = Field(default=NO_LIMITS)
    budgets: Budgets = Field(default=[])


class SecuritySettings(Section):
    api_keys: Annotated[list[ApiKey], distinct("name", "sha256")] = Field(default=[])
    cache_salt_secret: Annotated[SecretStr, Field(min_length=16)] | None = None
    records_secret: Annotated[SecretStr, Field(min_length=16)] | None = None
    other_records_secret: Annotated[SecretStr, Field(min_length=16)] | None = None
    replica_api_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    share_cache: bool = False
    expose_decisions: bool = False
    allow_priority: bool = False
    allow_origins: list[str] = Field(default=[])
    hosts: list[str] = Field(default=[])
    image_hosts: list[HostName] = Field(default=[])
    media_folder: Annotated[str, Field(pattern=r"^(/[^/\x00]+)+/?$")] | None = None
    allowed_paths: list[Annotated[str, Field(pattern=r"^/")]] = Field(default=[])
    denied_paths: list[Annotated[str, Field(pattern=r"^/")]] = Field(default=[])

    @model_validator(mode="after")
    def _tenants_are_kept_apart(self) -> Self:
        if self.api_keys and not self.share_cache and self.cache_salt_secret is None:
            raise ValueError(
                "api_keys need a cache_salt_secret, or tenants could probe each other's cache; set it "
                "(or KVGATE_CACHE_SALT_SECRET, also in the shell that checks the file), or share_cache: true if all "
                "keys trust each other"
            )
        return self

    @model_validator(mode="after")
    def _keys_are_asked_for(self) -> Self:
        if self.records_secret is not None and not self.api_keys:
            raise ValueError(
                "records_secret needs api_keys: without any, a gateway is open to everybody, whatever keys are made. "
                "Give one key with admin: true, which makes the others"
            )
        if self.other_records_secret is not None and self.records_secret is None:
            raise ValueError("other_records_secret needs records_secret: it only helps to replace that one")
        return self

    @field_validator("allow_origins")
    @classmethod
    def _are_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin == "*":
                continue
            if "*" in origin:
                raise ValueError(
                    f"{origin!r} is a pattern, and origins are compared as text: write each origin, like "
                    "https://app.example.com; or * for any"
                )
            if not _is_origin(origin.lower()):
                raise ValueError(
                    f"{origin!r} is no origin: write it like https://app.example.com, in small letters, with no path, "
                    "no / at its end and no port that is the usual one; or * for any"
                )
        return [origin.lower() for origin in origins]


class StoreSettings(Section):
    watch: bool = True
    chunk_ttl_s: Annotated[int, Field(ge=60, le=31_536_000)] = 86_400


class DecisionSettings(Section):
    max_bytes: Annotated[int, Field(ge=0, le=2**30)] = 2**26
    cost_share: Annotated[float, Field(ge=0, le=1)] = 0.1

    @field_validator("max_bytes")
    @classmethod
    def _is_none_or_enough(cls, max_bytes: int) -> int:
        if 0 < max_bytes < LEAST_BYTES:
            raise ValueError(f"must be 0, which keeps none, or at least {LEAST_BYTES}")
        return max_bytes


class LogSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"
    access_log: Annotated[str, Field(min_length=1)] | None = None


class ConsoleSettings(Section):
    enabled: bool = True


def default_id() -> str:
    """This host's name, in the characters of an id. It is unique if each gateway has its own host or container."""
    return re.sub(r"[^a-z0-9._-]", "-", socket.gethostname().lower())[:48] or "gateway"


class GatewaySettings(Section):
    id: Slug = Field(default_factory=default_id)
    host: Annotated[str, Field(min_length=1)] = "0.0.0.0"
    port: Port = 8080
    shared_port: Port | None = None
    tls: CertificateSettings | None = None
    replica_tls: CertificateSettings | None = None
    redis: RedisSettings = RedisSettings()
    # The load and the cache of one engine under two ids would be counted as those of two engines.
    replicas: Annotated[list[ReplicaSettings], distinct("id", "engine: url and dp_rank")] = Field(default=[])
    discovery: DiscoverySettings = DiscoverySettings()
    models: Annotated[list[ModelSettings], AfterValidator(check_models)] = Field(default=[])
    policy: PolicySettings = PolicySettings()
    queue: QueueSettings = QueueSettings()
    tenants: Annotated[list[TenantSettings], distinct("name")] = Field(default=[])
    billing: BillingSettings = BillingSettings()
    limits: LimitSettings = LimitSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    retries: RetrySettings = RetrySettings()
    resume: ResumeSettings = ResumeSettings()
    hedge: HedgeSettings = HedgeSettings()
    pairs: PairSettings = PairSettings()
    health: HealthSettings = HealthSettings()
    security: SecuritySettings = SecuritySettings()
    store: StoreSettings = StoreSettings()
    decisions: DecisionSettings = DecisionSettings()
    log: LogSettings = LogSettings()
    console: ConsoleSettings = ConsoleSettings()
    tracing: TracingSettings = TracingSettings()
    picker: PickerSettings = PickerSettings()

    @model_validator(mode="after")
    def _priorities_are_bands(self) -> Self:
        bands = [band.name for band in self.queue.bands]
        for tenant in self.tenants:
            if tenant.priority is not None and tenant.priority not in bands:
                raise ValueError(
                    f"tenants: {tenant.name} has the priority {tenant.priority}, which is none of queue.bands: "
                    + ", ".join(bands)
                )
        return self

    @model_validator(mode="after")
    def _prices_are_of_models(self) -> Self:
        model_of = {alias: model.name for model in self.models for alias in model.aliases}
        for price in self.billing.prices:
            if (model := model_of.get(price.model)) is not None:
                raise ValueError(f"billing.prices: {price.model} is an alias of {model}; give the price of {model}")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.shared_port == self.port:
            raise ValueError("shared_port must differ from port; leave it out where each host has one gateway")
        return self

    @model_validator(mode="after")
    def _tenants_have_one_source(self) -> Self:
        if self.picker.tenant is None:
            return self
        if self.security.api_keys:
            raise ValueError("picker.tenant: who calls is told by the proxy or by security.api_keys, not by both")
        if self.security.cache_salt_secret is None and not self.security.share_cache:
            raise ValueError(
                "picker.tenant needs security.cache_salt_secret, or tenants could probe each other's cache; or "
                "security.share_cache: true if all tenants trust each other"
            )
        return self

    def finds_replicas(self) -> bool:
        """Whether it may use replicas that it does not list."""
        return self.discovery != DiscoverySettings() or self.security.records_secret is not None

    def fingerprint(self) -> dict[str, str]:
        """A digest of each section in which the gateways of a cluster should agree. Of a secret, it only shows whether
        there is one."""
        told = self.model_dump(mode="json", exclude={*_OF_ONE_GATEWAY, "redis"})
        told["replicas"].sort(key=lambda replica: replica["id"])
        told["redis"] = self.redis.model_dump(mode="json", exclude={"url"})
        return {
            section: blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
            for section, value in told.items()
        }


def load_settings(paths: Path | Sequence[Path], env: Mapping[str, str]) -> GatewaySettings:
    """Reads the file, or several of which a later one goes before an earlier one, applies the overrides in `env` (an
    empty one counts as unset) and checks everything.

    Raises SettingsError with all problems.
    """
    data: dict[Any, Any] = {}
    problems: list[str] = []
    path = Path()
    for path in [paths] if isinstance(paths, Path) else paths:
        read, found = read_file(path)
        data, problems = merged(data, read), problems + found
    if "vllm" in data and not data.keys() & (GatewaySettings.model_fields.keys() - _OF_REPLICAS_TOO):
        looks = f"file: looks like a replica's file: kvgate replica-command --config {path} checks it"
        raise SettingsError([f"{looks}. A gateway's file is like configs/gateway.yaml"])
    return build_settings(data, env, problems)


def build_settings(
    data: dict[Any, Any], env: Mapping[str, str], known_problems: list[str] | None = None
) -> GatewaySettings:
    """Like `load_settings`, from a parsed YAML mapping."""
    return build(GatewaySettings, data, env, OVERRIDES, known_problems)


def _is_origin(text: str) -> bool:
    """Whether a browser sends it as the origin of a page."""
    if not _ORIGIN.fullmatch(text):
        return False
    try:
        parts = urlsplit(text)
    except ValueError:  # brackets without an IPv6 address
        return False
    return _has_valid_port(parts) and parts.port != {"http": 80, "https": 443}[parts.scheme]


def _has_valid_port(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False
