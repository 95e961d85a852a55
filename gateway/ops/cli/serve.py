"""Commands that are one process each, as they run in a container: gateway and replica-sim."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from gateway.ops.cli.config import load
from gateway.ops.cli.errors import CommandError
from gateway.ops.cli.imports import for_good
from gateway.simulator.settings import SimLmcacheSettings, SimSettings

_SIM = SimSettings()
_LMCACHE = SimLmcacheSettings(cpu_gb=1.0)


def _lmcache(text: str) -> SimLmcacheSettings:
    """`redis_url=redis://127.0.0.1:6379/0,chunk_tokens=64`."""
    kinds = {field.name: type(getattr(_LMCACHE, field.name)) for field in fields(SimLmcacheSettings)} | {
        "redis_url": str
    }
    told = dict(part.partition("=")[::2] for part in text.split(","))
    if unknown := told.keys() - kinds.keys():
        raise CommandError(f"--lmcache {text}: {', '.join(sorted(unknown))} is none of {', '.join(kinds)}")
    try:
        return SimLmcacheSettings(**{name: kinds[name](value) for name, value in told.items()})
    except ValueError as error:
        raise CommandError(f"--lmcache {text}: {error}") from None


ConfigFile = Annotated[Path, typer.Option("--config", metavar="FILE", help="The gateway's YAML configuration.")]
ReplicaId = Annotated[str, typer.Option("--id", help="Its name in logs and metrics.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
Model = Annotated[str, typer.Option(help="The model it says it is.")]
ServedNames = Annotated[
    list[str] | None,
    typer.Option(help="A name it serves the model under; repeatable.", show_default=_SIM.served_names[0]),
]
Adapters = Annotated[list[str] | None, typer.Option(help="A LoRA adapter it serves; repeatable.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens in one cache block.")]
Blocks = Annotated[int, typer.Option(min=1, help="Blocks in its cache.")]
Sequences = Annotated[int, typer.Option(min=1, help="Requests it runs at once.")]
BatchedTokens = Annotated[int, typer.Option(min=1, help="Tokens of one step.")]
DataParallel = Annotated[int, typer.Option(min=1, help="Engines in it, one per rank.")]
PrefillRate = Annotated[float, typer.Option(help="Tokens it prefills in a second.")]
DecodeTime = Annotated[float, typer.Option(help="Seconds of one decode step.")]
VllmVersion = Annotated[str, typer.Option(help="The vLLM version it says it is; decides the shape of KV events.")]
Events = Annotated[bool, typer.Option(help="Publish KV events over ZeroMQ.")]
EventsPort = Annotated[int, typer.Option(min=0, max=65535, help="Port for KV events, plus the rank; 0: a free one.")]
ReplayPort = Annotated[int, typer.Option(min=0, max=65535, help="Port for replays, plus the rank; 0: a free one.")]
ReplaySteps = Annotated[int, typer.Option(min=0, help="Event batches kept for replays; 0 means no replays.")]
CpuBlocks = Annotated[int, typer.Option(min=0, help="Blocks of its CPU offload tier; 0 means it has none.")]
Lmcache = Annotated[
    SimLmcacheSettings | None,
    typer.Option(
        parser=_lmcache,
        metavar="FIELD=VALUE,…",
        help="LMCache beside it: cpu_gb, redis_url, or both, and chunk_tokens, key_prefix, ttl_s, value_bytes …",
    ),
]
Speed = Annotated[float, typer.Option(help="Divides every simulated time; 0 means no delays at all.")]


def gateway(config: ConfigFile) -> None:
    """Run one gateway until SIGTERM, then finish its streams and leave.

    Every field of the configuration is shown in configs/gateway.yaml; KVGATE_ID,
    KVGATE_REDIS_URL, KVGATE_REDIS_NAMESPACE and KVGATE_CACHE_SALT_SECRET override
    theirs.

    \b
    Examples:
      kvgate gateway --config configs/gateway.yaml
      KVGATE_ID=gw7 KVGATE_REDIS_URL=rediss://redis:6379 \\
          kvgate gateway --config gw.yaml
    """
    with for_good():
        settings = load(config)
        from gateway.server import serve

    try:
        serve(settings)
    except OSError as error:
        raise CommandError(f"cannot listen on {settings.host}: {error.strerror or error}") from None


def replica_sim(
    replica_id: ReplicaId = _SIM.id,
    host: Host = _SIM.host,
    port: Port = 8000,
    model: Model = _SIM.model,
    served_name: ServedNames = None,
    adapter: Adapters = None,
    block_size: BlockSize = _SIM.block_size,
    num_gpu_blocks: Blocks = _SIM.num_gpu_blocks,
    max_num_seqs: Sequences = _SIM.max_num_seqs,
    max_num_batched_tokens: BatchedTokens = _SIM.max_num_batched_tokens,
    data_parallel: DataParallel = _SIM.data_parallel,
    prefill_tokens_per_s: PrefillRate = _SIM.prefill_tokens_per_s,
    decode_s_per_token: DecodeTime = _SIM.decode_s_per_token,
    speed: Speed = _SIM.speed,
    vllm_version: VllmVersion = _SIM.vllm_version,
    events: Events = _SIM.events,
    events_port: EventsPort = _SIM.events_port,
    replay_port: ReplayPort = _SIM.replay_port,
    replay_steps: ReplaySteps = _SIM.replay_steps,
    cpu_blocks: CpuBlocks = _SIM.cpu_blocks,
    lmcache: Lmcache = None,
) -> None:
    """Run one simulated replica: an HTTP server that behaves like vLLM, without a GPU.

    It keeps a real block-hashed prefix cache and takes the time that prefill and
    decode would take. The defaults are rough figures for a 7-8B vision-language
    model on an A40-like card. GET /kv_event_sources tells where its KV events are.
    With --lmcache (gateway/simulator/settings.py has all fields) the chunks of its
    prompts are in Redis under the names that a real LMCache would give them, and
    an agent is told of it: kvgate agent --lmcache http://127.0.0.1:8004/lmcache.

    \b
    Examples:
      kvgate replica-sim --port 8001
      kvgate replica-sim --id r1 --port 8002 --speed 10 --num-gpu-blocks 2048
      kvgate replica-sim --port 8003 --events-port 5557 --replay-port 5558
      kvgate replica-sim --port 8004 \\
          --lmcache redis_url=redis://127.0.0.1:6379/0,chunk_tokens=64
    """
    try:
        settings = SimSettings(
            id=replica_id,
            host=host,
            port=port,
            model=model,
            served_names=tuple(served_name or _SIM.served_names),
            adapters=tuple(adapter or ()),
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            data_parallel=data_parallel,
            prefill_tokens_per_s=prefill_tokens_per_s,
            decode_s_per_token=decode_s_per_token,
            speed=speed,
            vllm_version=vllm_version,
            events=events,
            events_port=events_port,
            replay_port=replay_port,
            replay_steps=replay_steps,
            cpu_blocks=cpu_blocks,
            lmcache=lmcache,
        )
    except ValueError as error:
        raise CommandError(str(error)) from None
    _serve_replica(settings)


def _serve_replica(settings: SimSettings) -> None:
    with for_good():
        from gateway.simulator.server import run

    host, port = settings.host, settings.port
    try:
        run(settings, lambda bound: typer.echo(f"replica {settings.id} on http://{host}:{bound}"))
    except OSError as error:
        raise CommandError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
