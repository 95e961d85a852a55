"""Commands that are one process each, as they run in a container: gateway and replica-sim."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from gateway.ops.cli.config import contradictions_in, load
from gateway.ops.cli.imports import long_lived_imports
from gateway.ops.errors import CommandError
from gateway.simulator.settings import SimLmcacheSettings, SimSettings

_SIM = SimSettings()
_LMCACHE = SimLmcacheSettings(cpu_gb=1.0)


def _lmcache(text: str) -> SimLmcacheSettings:
    """`redis_url=redis://127.0.0.1:6379/0,chunk_tokens=64`."""
    kinds = {name: type(value) for name, value in dataclasses.asdict(_LMCACHE).items()} | {"redis_url": str}
    told = dict(part.partition("=")[::2] for part in text.split(","))
    if unknown := told.keys() - kinds.keys():
        raise CommandError(f"--lmcache {text}: {', '.join(sorted(unknown))} is none of {', '.join(kinds)}")
    try:
        return SimLmcacheSettings(**{name: kinds[name](value) for name, value in told.items()})
    except ValueError as error:
        raise CommandError(f"--lmcache {text}: {error}") from None


ConfigFile = Annotated[
    list[Path],
    Option("--config", metavar="FILE", help="The gateway's YAML configuration; of several, the later ones override."),
]


def gateway(config: ConfigFile) -> None:
    """Run one gateway until SIGTERM, then finish its answers and exit.

    It follows its configuration: when a file changes, or on SIGHUP, most settings
    change without a restart. The log says what differs and needs one.

    Every field of the configuration is shown in configs/gateway.yaml; KVGATE_ID,
    KVGATE_REDIS_URL, KVGATE_REDIS_NAMESPACE, KVGATE_CACHE_SALT_SECRET,
    KVGATE_RECORDS_SECRET, KVGATE_OTHER_RECORDS_SECRET, KVGATE_REPLICA_API_KEY,
    KVGATE_REPLICA_TLS_CERTIFICATE and KVGATE_REPLICA_TLS_KEY override the fields
    of the same names.

    \b
    Examples:
      kvgate gateway --config configs/gateway.yaml
      KVGATE_ID=gw7 KVGATE_REDIS_URL=rediss://redis:6379 \\
          kvgate gateway --config gw.yaml
    """
    _serve(config, is_picker=False)


def picker(config: ConfigFile) -> None:
    """Run one endpoint picker for Envoy and other gateways, until SIGTERM.

    It answers the ext_proc calls of Envoy, Istio, GKE's Gateway or agentgateway
    (docs/picker.md): they send a request where it says. It places requests as a
    gateway does, in the same Redis, and any number of pickers and gateways run
    side by side. It takes a gateway's configuration; the section `picker` has its
    own fields. It also answers what a gateway answers, on `port`: /metrics, /ready.
    It needs some packages more: pip install 'kvgate[picker]'.

    \b
    Examples:
      kvgate picker --config configs/gateway.yaml
      KVGATE_ID=picker1 kvgate picker --config gw.yaml --config picker.yaml
    """
    try:
        import gateway.picker.gateway  # noqa: F401 - to say at once what is missing
    except ImportError as error:
        raise CommandError(f"{error.name} is missing: pip install 'kvgate[picker]'") from None
    _serve(config, is_picker=True)


def _serve(config: list[Path], *, is_picker: bool) -> None:
    import os

    with long_lived_imports():
        from gateway.app import Gateway
        from gateway.reload import ConfigFiles

        files = ConfigFiles(config, os.environ, contradictions_in)
        settings = load(config)
        from gateway.access_log import CannotWrite
        from gateway.server import listen, serve
        from gateway.tls import BadCertificate
        from gateway.tracing.otel_variables import BadVariable
        from gateway.tracing.tracing import variables_for

    make = Gateway
    try:
        if is_picker:
            from gateway.picker.gateway import PickingGateway as make  # noqa: N813
            from gateway.picker.service import credentials

            credentials(settings.picker)  # its mistakes are said before a picker starts
            listen(settings.picker.host, settings.picker.port, shared=False).close()
        serve(settings, variables_for(settings.tracing, os.environ), files, make)
    except (BadCertificate, BadVariable, CannotWrite) as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot listen on {settings.host}: {error.strerror or error}") from None


# The options of replica-sim that need more than a line.
ServedNames = Annotated[
    list[str] | None, Option("--served-name", help="A name of the model; repeatable.", show_default="sim")
]
RankPort = Annotated[int, Option(min=0, max=65535, help="That of rank 0, followed by the others'; 0: free ones.")]
Lmcache = Annotated[
    SimLmcacheSettings | None,
    Option(
        parser=_lmcache,
        metavar="FIELD=VALUE,…",
        help="LMCache beside it: cpu_gb, redis_url, or both, and chunk_tokens, key_prefix, ttl_s, value_bytes …",
    ),
]


def replica_sim(
    id: Annotated[str, Option(help="Its name in logs and metrics.")] = _SIM.id,  # noqa: A002 - a field's name
    host: Annotated[str, Option(help="Address to listen on.")] = _SIM.host,
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    model: Annotated[str, Option(help="The model that it says it runs.")] = _SIM.model,
    served_names: ServedNames = None,
    adapters: Annotated[list[str] | None, Option("--adapter", help="A LoRA adapter to serve; repeatable.")] = None,
    block_size: Annotated[int, Option(min=1, help="Tokens in one cache block.")] = _SIM.block_size,
    num_gpu_blocks: Annotated[int, Option(min=1, help="Blocks in its cache.")] = _SIM.num_gpu_blocks,
    max_num_seqs: Annotated[int, Option(min=1, help="Requests that it runs at once.")] = _SIM.max_num_seqs,
    max_num_batched_tokens: Annotated[int, Option(min=1, help="Tokens of one step.")] = _SIM.max_num_batched_tokens,
    data_parallel: Annotated[int, Option(min=1, help="Engines in it, one per rank.")] = _SIM.data_parallel,
    data_parallel_start_rank: Annotated[int, Option(min=0, help="The rank of its first engine.")] = 0,
    rust_frontend: Annotated[bool, Option("--rust-frontend", help="Behave like vLLM's front end in Rust.")] = False,
    prefill_tokens_per_s: Annotated[
        float, Option(min=1, help="Tokens of prompts a second.")
    ] = _SIM.prefill_tokens_per_s,
    decode_s_per_token: Annotated[float, Option(min=0, help="Seconds of one decode step.")] = _SIM.decode_s_per_token,
    speed: Annotated[float, Option(min=0, help="Divides every simulated time; 0 means no delays at all.")] = _SIM.speed,
    vllm_version: Annotated[str, Option(help="The version of vLLM that it says it is.")] = _SIM.vllm_version,
    attention: Annotated[list[str] | None, Option(help="The kind of a group of its blocks; repeatable.")] = None,
    events: Annotated[bool, Option(help="Publish KV events over ZeroMQ.")] = _SIM.events,
    events_port: RankPort = _SIM.events_port,
    replay_port: RankPort = _SIM.replay_port,
    replay_steps: Annotated[int, Option(min=0, help="Event batches to replay; 0: none.")] = _SIM.replay_steps,
    cpu_blocks: Annotated[int, Option(min=0, help="Blocks of its CPU offload tier; 0 means none.")] = _SIM.cpu_blocks,
    lmcache: Lmcache = None,
    nixl: Annotated[bool, Option("--nixl", help="Hand KV blocks over to other servers, and take theirs.")] = False,
    pd_role: Annotated[str, Option(help="A role that it can change: prefill or decode; needs --nixl.")] = "",
    mooncake: Annotated[bool, Option("--mooncake", help="The same by vLLM's MooncakeConnector.")] = False,
    recomputes: Annotated[bool, Option("--recomputes", help="Compute a prompt whose blocks it cannot take.")] = False,
) -> None:
    """Run one simulated replica: an HTTP server that behaves like vLLM, without a GPU.

    It keeps a real block-hashed prefix cache and takes the time that prefill and
    decode would take. The defaults are rough figures for a 7-8B vision-language
    model on an A40-like card. GET /kv_event_sources returns the addresses of its
    KV events. With --lmcache, it writes its prompts' chunks to Redis under the
    names that a real LMCache gives them (gateway/simulator/settings.py has all
    fields); its agent needs: --lmcache http://127.0.0.1:8004/lmcache.

    \b
    Examples:
      kvgate replica-sim --port 8001
      kvgate replica-sim --id r1 --port 8002 --speed 10 --num-gpu-blocks 2048
      kvgate replica-sim --port 8003 --events-port 5557 --replay-port 5558
      kvgate replica-sim --port 8004 \\
          --lmcache redis_url=redis://127.0.0.1:6379/0,chunk_tokens=64
    """
    fields = {  # each parameter is named after the field that it fills
        **locals(),
        "served_names": tuple(served_names or _SIM.served_names),
        "adapters": tuple(adapters or ()),
        "attention": tuple(attention or _SIM.attention),
    }
    with long_lived_imports():
        from gateway.simulator.server import run

    try:
        run(SimSettings(**fields), lambda bound: typer.echo(f"replica {id} on http://{host}:{bound}"))
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
