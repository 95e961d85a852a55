"""The settings in a replica's file, as one frozen object. `configs/replica-*.yaml` show every field.

The environment can override four of them (see OVERRIDES), so that one file serves a fleet and contains no secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from coordinator.redis.address import split
from gateway.settings.base import Count, Port, Section, Slug
from gateway.settings.config_file import build, read_file
from gateway.settings.gateway_settings import RedisAddress, StoreSettings, checked_redis_url

OVERRIDES = {
    "KVGATE_REPLICA_ID": ("id",),
    "KVGATE_REDIS_URL": ("redis", "url"),
    "KVGATE_REDIS_NAMESPACE": ("redis", "namespace"),
    "KVGATE_LMCACHE_URL": ("lmcache", "redis", "url"),
}
Gigabytes = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
Program = Annotated[str, Field(min_length=1)]
Host = Annotated[str, Field(pattern=r"^[^/:\s]+$")]

_ALL_INTERFACES = "0.0.0.0"
# `kvgate replica-command` writes these options itself. Of an option given twice, the last one would silently win.
_OWN_VLLM_OPTIONS = """
    block-size dtype enable-prefix-caching enable-prompt-tokens-details gpu-memory-utilization host kv-cache-dtype
    kv-events-config kv-offloading-backend kv-offloading-size kv-transfer-config max-model-len no-enable-prefix-caching
    port prefix-caching-hash-algo served-model-name tensor-parallel-size
"""
_OWN_LMCACHE_OPTIONS = """
    chunk-size eviction-policy hash-algorithm host http-host http-port instance-id l1-size-gb l2-adapter l2-store-policy
    port prometheus-port
"""


def _others_than(own: str) -> AfterValidator:
    """The check of further arguments."""

    def check(arguments: list[str]) -> list[str]:
        for argument in arguments:
            option = argument.partition("=")[0]
            if option.startswith("-") and (words := option.split())[1:]:  # the rest may be secret
                item = f"[{words[0]}, VALUE]"
                raise ValueError(f"{words[0]} and its value are one item with a space; make them two: {item}")
            name = option.removeprefix("--").replace("_", "-")
            if argument.startswith("--") and name == "api-key":
                where = "leave it out and export VLLM_API_KEY where vLLM is started"
                raise ValueError(f"--api-key would be printed; {where}")
            if argument.startswith("--") and name in own.split():
                raise ValueError(f"--{name} is written from its own field; set that, and leave it out here")
        return arguments

    return AfterValidator(check)


class VllmSettings(Section):
    model: Annotated[str, Field(min_length=1, pattern=r"^[^@]+$")]
    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    host: Host = _ALL_INTERFACES
    port: Port = 8000
    max_model_len: Count
    block_size: Count = 16
    tensor_parallel_size: Count = 1
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    kv_bytes_per_token: Count | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    extra_args: Annotated[list[str], _others_than(_OWN_VLLM_OPTIONS)] = Field(default=[])


class EventSettings(Section):
    host: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+\.\d+$")] = "127.0.0.1"
    port: Port = 5557
    replay_port: Port = 5558


class AgentSettings(Section):
    control_port: Annotated[int, Field(ge=0, le=65535)] = 0


class OffloadSettings(Section):
    size_gb: Gigabytes


def _checked_chunk_url(url: str) -> str:
    checked_redis_url(url)
    parts = split(url)
    if parts.scheme == "unix":
        raise ValueError("LMCache speaks TCP only; must start with redis:// or rediss://")
    if "+" in parts.scheme:
        raise ValueError("LMCache's chunks go to one server; must start with redis:// or rediss://")
    if parts.username and not parts.password:
        raise ValueError("names a user without a password, and LMCache logs in with both or not at all")
    if parts.query:
        raise ValueError("LMCache knows no options after the question mark; leave them out")
    if not re.fullmatch(r"/?\d*", parts.path):
        raise ValueError("the path must be a database's number, like redis://127.0.0.1:6379/0")
    if parts.hostname and ":" in parts.hostname:
        raise ValueError("LMCache takes host:port; give the host's name instead of an IPv6 address")
    return url


class ChunkRedisSettings(Section):
    url: Annotated[str, AfterValidator(_checked_chunk_url)] | None = Field(default=None, repr=False)
    ttl_seconds: Annotated[int, Field(ge=60)] = StoreSettings().chunk_ttl_s
    key_prefix: Annotated[str, Field(pattern=r"^[a-z0-9._-]{1,48}$")] = "kvchunk"
    max_stall_s: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = 2.0

    @field_validator("key_prefix")
    @classmethod
    def _is_none_of_kvgates(cls, prefix: str) -> str:
        if prefix == "kvgate":
            raise ValueError("kvgate is where KVGate's own keys begin; take another, like kvchunk")
        return prefix


class DiskSettings(Section):
    folder: Annotated[str, Field(pattern=r"^/")]
    size_gb: Gigabytes


class MooncakeSettings(Section):
    master: Annotated[str, Field(pattern=r"^[^/:\s]+:\d+$")]
    host: Host
    share_gb: Gigabytes


class LmcacheSettings(Section):
    cpu_gb: Gigabytes
    keep_in_cpu: bool = True
    redis: ChunkRedisSettings | None = None
    disk: DiskSettings | None = None
    mooncake: MooncakeSettings | None = None
    chunk_tokens: Count | None = None
    port: Port = 5555
    http_port: Port = 5580
    prometheus_port: Port = 5590
    extra_args: Annotated[list[str], _others_than(_OWN_LMCACHE_OPTIONS)] = Field(default=[])

    @model_validator(mode="after")
    def _chunks_are_kept_somewhere(self) -> Self:
        if not (self.keep_in_cpu or self.redis or self.disk or self.mooncake):
            raise ValueError("keep_in_cpu: false leaves chunks nowhere to go; add redis, disk or mooncake")
        return self


class ProgramSettings(Section):
    vllm: Program = "vllm"
    lmcache: Program = "lmcache"
    lmcache_python: Program = "python3"
    kvgate: Program = "kvgate"


class ReplicaFile(Section):
    id: Slug = "r0"
    vllm: VllmSettings
    events: EventSettings = EventSettings()
    agent: AgentSettings = AgentSettings()
    redis: RedisAddress = RedisAddress()
    cpu_offload: OffloadSettings | None = None
    lmcache: LmcacheSettings | None = None
    env: dict[str, str] = Field(default={})
    programs: ProgramSettings = ProgramSettings()

    @field_validator("env")
    @classmethod
    def _is_nothing_that_must_hold(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is no name of a variable")
            if name == "PYTHONHASHSEED" or (name.startswith("LMCACHE_") and name != "LMCACHE_TRACK_USAGE"):
                raise ValueError(f"{name} is set from the other fields, the same on all replicas; leave it out")
        return env

    @model_validator(mode="after")
    def _one_tier_below_the_gpu(self) -> Self:
        if self.cpu_offload is not None and self.lmcache is not None:
            raise ValueError("cpu_offload and lmcache are two answers to one question; leave one out")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ports = [self.vllm.port, self.events.port, self.events.replay_port]
        ports += [self.agent.control_port] if self.agent.control_port else []
        if self.lmcache is not None:
            ports += [self.lmcache.port, self.lmcache.http_port, self.lmcache.prometheus_port]
        twice = sorted({port for port in ports if ports.count(port) > 1})
        if twice:
            raise ValueError(f"port {twice[0]} is given twice; each of a replica's ports must be its own")
        return self

    @model_validator(mode="after")
    def _chunks_may_go_to_this_redis(self) -> Self:
        if self.lmcache is not None and self.lmcache.redis is not None and self.lmcache.redis.url is None:
            try:
                _checked_chunk_url(self.redis.url)
            except ValueError as error:
                raise ValueError(f"lmcache.redis has no url of its own, and redis.url: {error}") from None
        return self

    @property
    def chunk_redis(self) -> ChunkRedisAddress:
        """The Redis that chunks are stored in, if lmcache.redis is given."""
        own = None if self.lmcache is None or self.lmcache.redis is None else self.lmcache.redis.url
        return ChunkRedisAddress(urlsplit(own or self.redis.url), "KVGATE_LMCACHE_URL" if own else "KVGATE_REDIS_URL")


class ChunkRedisAddress:
    """The address of the Redis for chunks, in the parts that LMCache needs."""

    def __init__(self, parts: SplitResult, variable: str) -> None:
        self.address = f"{parts.hostname}:{parts.port or 6379}"
        self.tls = parts.scheme == "rediss"
        self.database = int(parts.path.strip("/") or 0)
        self.username = unquote(parts.username or "")
        self.password = unquote(parts.password or "")
        self.variable = variable
        """The environment variable that must hold the URL when the commands run, if it has a password."""


def load_replica(path: Path, env: Mapping[str, str]) -> ReplicaFile:
    """Reads `path`, applies the overrides in `env` and checks everything. Raises SettingsError with all problems."""
    data, problems = read_file(path)
    return build_replica(data, env, problems)


def build_replica(data: dict[Any, Any], env: Mapping[str, str], known_problems: list[str] | None = None) -> ReplicaFile:
    """Like `load_replica`, from a parsed YAML mapping."""
    overrides = dict(OVERRIDES)
    lmcache = data.get("lmcache")
    if not (isinstance(lmcache, dict) and isinstance(lmcache.get("redis"), dict)):
        del overrides["KVGATE_LMCACHE_URL"]  # the URL alone does not turn on storing chunks in Redis
    return build(ReplicaFile, data, env, overrides, known_problems)
