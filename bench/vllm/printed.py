"""Real replicas on this machine, started with the commands that `kvgate replica-command` prints: vLLM, and LMCache's
server beside it if the replica's file asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.vllm import install, lmcache
from bench.vllm.replicas import BLOCK_TOKENS, CONTEXT_TOKENS
from bench.vllm.server import Server, environment
from gateway.ops.local.ports import free_ports

_CPU_ARGUMENTS = {
    "max-num-seqs": "8",
    "max-num-batched-tokens": "1024",
    "distributed-executor-backend": "uni",
}
_START_TIMEOUT_S = 240.0


@dataclass
class Printed(Server):
    """A server with a printed command and environment."""

    argv: list[str]
    env: dict[str, str]

    def command(self) -> list[str]:
        return self.argv

    def environment(self) -> dict[str, str]:
        # The hash seed has to come from the printed environment.
        inherited = {name: value for name, value in environment(self.log.parent).items() if name != "PYTHONHASHSEED"}
        return inherited | self.env


@dataclass
class PrintedReplica:
    """An engine, LMCache's server if it has one, and an agent, which is not started."""

    engine: Printed
    server: Printed | None
    agent: Printed


def _kv_bytes_per_token(model: Path) -> int:
    """In float32."""
    told = json.loads((model / "config.json").read_text())
    text = told.get("text_config", told)
    head_size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return int(2 * text["num_hidden_layers"] * text["num_key_value_heads"] * head_size * 4)


def replica_file(
    name: str, redis_url: str, tier: dict[str, Any] | None, size: str = install.TINY, blocks: int = 640
) -> dict[str, Any]:
    """A replica's file for a model on CPUs. `tier` is its section `lmcache` without the common settings."""
    ports = iter(free_ports(6))
    options = {"num-gpu-blocks-override": str(blocks), **_CPU_ARGUMENTS}
    arguments = [part for option, value in options.items() for part in (f"--{option}", value)]
    told: dict[str, Any] = {
        "id": name,
        "vllm": {
            "model": str(install.model(size)),
            "served_model_name": install.MODEL,
            "host": "127.0.0.1",
            "port": next(ports),
            "max_model_len": CONTEXT_TOKENS,
            "block_size": BLOCK_TOKENS,
            "kv_bytes_per_token": _kv_bytes_per_token(install.model(size)),
            "dtype": "float32",  # an answer must not depend on what was cached, not even by rounding
            "extra_args": ["--enforce-eager", *arguments],
        },
        "events": {"port": next(ports), "replay_port": next(ports)},
        "redis": {"url": redis_url},
        "env": lmcache.environment(),
        "programs": {
            "vllm": str(install.environment() / "bin" / "vllm"),
            "lmcache": str(lmcache.program()),
            "lmcache_python": str(install.python()),
            "kvgate": str(Path(sys.executable).with_name("kvgate")),
        },
    }
    if tier is not None:
        ports_of_it = {"port": next(ports), "http_port": next(ports), "prometheus_port": next(ports)}
        told["lmcache"] = {"extra_args": ["--supported-transfer-mode", "auto"], **ports_of_it, **tier}
    return told


def printed(folder: Path, told: dict[str, Any], secrets: Mapping[str, str]) -> dict[str, Any]:
    """The output of `kvgate replica-command --json` for a replica's file, by command name.

    Raises RuntimeError with the command's message if it refuses the file.
    """
    file = folder / f"{told['id']}.yaml"
    file.write_text(yaml.safe_dump(told))
    command = [sys.executable, "-P", "-m", "gateway.ops.cli", "replica-command", "--config", str(file), "--json"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    done = subprocess.run(command, env=env | dict(secrets), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().replace(f"{folder}/", ""))
    return {each["name"]: each for each in json.loads(done.stdout)}


@contextmanager
def running(
    folder: Path, files: Sequence[dict[str, Any]], secrets: Mapping[str, str] | None = None
) -> Iterator[list[PrintedReplica]]:
    """A replica for each file. All start at the same time and are killed at the end. Logs are in `folder`."""
    started, secrets = time.monotonic(), secrets or {}
    with ExitStack() as stack:
        replicas = [_replica(folder, told, printed(folder, told, secrets), secrets) for told in files]
        servers = [replica.server for replica in replicas if replica.server is not None]
        for server in servers:
            stack.callback(server.kill)
            server.start()
        for server in servers:
            server.wait_until_healthy()
        for replica in replicas:
            stack.callback(replica.engine.kill)
            replica.engine.start()
        for replica in replicas:
            replica.engine.wait_until_healthy(_START_TIMEOUT_S)
        print(f"\n{len(replicas)} replicas serve after {time.monotonic() - started:.0f} s", flush=True)
        yield replicas


def _replica(
    folder: Path, told: dict[str, Any], commands: dict[str, Any], secrets: Mapping[str, str]
) -> PrintedReplica:
    name, engine, agent = told["id"], commands["vllm"], commands["agent"]
    server = None
    if (found := commands.get("lmcache")) is not None:
        env = found["env"] | {needed: secrets[needed] for needed in found["needs"]}
        log = folder / f"{name}-lmcache.log"
        port = told["lmcache"]["http_port"]
        server = Printed(f"{name}-lmcache", port, log, found["argv"], env, health_path="/healthcheck")
    return PrintedReplica(
        Printed(name, told["vllm"]["port"], folder / f"{name}.log", engine["argv"], engine["env"]),
        server,
        Printed(name, 0, folder / f"{name}-agent.log", agent["argv"], agent["env"]),
    )
