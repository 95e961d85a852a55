"""From a replica's settings to its commands, in the order in which they start."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from gateway.ops.replica import lmcache_options as lmcache
from gateway.ops.replica import vllm
from gateway.ops.replica.settings import LmcacheSettings, ReplicaFile, VllmSettings
from gateway.ops.replica.sharing import Pace, check_chunk, chunk_tokens, chunks_of, pace, usual_chunk_tokens
from gateway.settings.config_file import SettingsError

_HOW = (
    "give what one token's KV takes on one GPU: 2 x layers x KV heads on one GPU x head dimension x bytes of a number, "
    "for example 2 x 28 x 4 x 128 x 2 = 57344 for Qwen2.5-7B in bfloat16"
)


@dataclass(frozen=True)
class Command:
    """A process to start. `env` is added to its environment, which must contain the variables of `needs`."""

    name: str
    about: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    needs: dict[str, str] = field(default_factory=dict)
    """Variables that hold a secret, with a description. Their values are never printed."""


def commands(replica: ReplicaFile) -> list[Command]:
    """The commands in order. The agent starts before the engine, so that it misses no event.

    Raises SettingsError for problems that appear only when sizes are computed.
    """
    tier = replica.lmcache
    server = [] if tier is None else [_lmcache_server(replica, tier, *_sizes(tier, replica.vllm))]
    return [*server, _agent(replica), _vllm(replica)]


def _sizes(tier: LmcacheSettings, engine: VllmSettings) -> tuple[int, Pace | None]:
    """The tokens of a chunk, and the pace of requests to Redis if chunks are stored there."""
    if tier.chunk_tokens is not None and tier.chunk_tokens % engine.block_size:
        what = f"is {tier.chunk_tokens}; must be a multiple of vllm.block_size, {engine.block_size}"
        raise SettingsError([f"lmcache.chunk_tokens: {what}"])
    if tier.redis is None:
        return tier.chunk_tokens or usual_chunk_tokens(engine.block_size), None
    token_bytes = engine.kv_bytes_per_token
    if token_bytes is None:
        raise SettingsError([f"vllm.kv_bytes_per_token: is missing; {_HOW}"])
    tokens = tier.chunk_tokens or chunk_tokens(token_bytes, engine.block_size)
    check_chunk(tokens, token_bytes, engine.block_size)
    return tokens, pace(chunks_of(engine.max_model_len, tokens, engine.tensor_parallel_size), tier.redis.max_stall_s)


def _lmcache_server(replica: ReplicaFile, tier: LmcacheSettings, chunk: int, redis_pace: Pace | None) -> Command:
    argv = lmcache.server_arguments(replica, tier, chunk, redis_pace)
    needs = {}
    if tier.redis is not None and replica.chunk_redis.password:
        variable = replica.chunk_redis.variable
        needs[variable] = "the URL, with its password, of the Redis that chunks go to"
        argv = [replica.programs.lmcache_python, "-c", lmcache.LAUNCHER, variable, *argv]
    else:
        argv = [replica.programs.lmcache, *argv]
    env = {"PYTHONHASHSEED": "0", **lmcache.environment(tier), **replica.env}
    return Command("lmcache", lmcache.about(replica, tier, chunk), argv, env, needs)


def _vllm(replica: ReplicaFile) -> Command:
    waits = " Start it once the LMCache server answers." if replica.lmcache else ""
    argv = [replica.programs.vllm, *vllm.arguments(replica)]
    return Command("vllm", f"the engine.{waits}", argv, {"PYTHONHASHSEED": "0", **replica.env})


def _agent(replica: ReplicaFile) -> Command:
    """The agent reads the URL of Redis from its environment, where other users of the host cannot see it."""
    argv = [
        *(replica.programs.kvgate, "agent"),
        *("--replica", replica.id, "--url", f"http://{vllm.local(replica.vllm.host)}:{replica.vllm.port}"),
        *("--events", f"tcp://{vllm.local(replica.events.host)}:{replica.events.port}"),
        *("--replay", f"tcp://{vllm.local(replica.events.host)}:{replica.events.replay_port}"),
    ]
    if replica.agent.control_port:
        argv += ["--control-port", str(replica.agent.control_port)]
    if replica.lmcache is not None and replica.lmcache.redis is not None:
        argv += ["--lmcache", f"http://{lmcache.HERE}:{replica.lmcache.http_port}"]
    if replica.redis.namespace:
        argv += ["--redis-namespace", replica.redis.namespace]
    about = "tells KVGate what the engine holds. Start it before the engine: then it misses none of its events."
    if vllm.has_password(replica.redis.url):
        needs = {"KVGATE_REDIS_URL": "the URL, with its password, of the Redis that the gateways share"}
        return Command("agent", about, argv, needs=needs)
    return Command("agent", about, argv, env={"KVGATE_REDIS_URL": replica.redis.url})


def as_json(found: list[Command]) -> list[dict[str, Any]]:
    """For programs: each command's name, about, argv, env, and the names of the variables that it needs."""
    return [{**asdict(command), "needs": sorted(command.needs)} for command in found]


def as_shell(found: list[Command]) -> str:
    """For people: a paragraph per command, to paste into a shell of its own."""
    return "\n\n".join("\n".join(_paragraph(command)) for command in found) + "\n"


def _paragraph(command: Command) -> Iterator[str]:
    yield f"# {command.name}: {command.about}"
    for variable, what in command.needs.items():
        message = f"{what}, is not printed here; export it first"
        yield f': "${{{variable}:?{message}}}"; export {variable}'
    for name, value in command.env.items():
        yield f"export {name}={shlex.quote(value)}"
    # `exec`, so that a signal to the shell reaches the process.
    yield "exec " + " \\\n  ".join(_lines(command.argv))


def _lines(argv: list[str]) -> list[str]:
    """The quoted arguments. Each option is on a line of its own, with its values."""
    lines: list[list[str]] = [[]]
    for argument in argv:
        if argument.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(argument))
    return [" ".join(line) for line in lines]
