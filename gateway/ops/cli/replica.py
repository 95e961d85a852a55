"""The command `kvgate replica-command`: how to start one replica."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from gateway.ops.cli.config import refused
from gateway.ops.errors import CommandError

_OF_A_GATEWAY = ("replicas: ", "policy: ", "port: ")
"""Problems with keys that only a gateway's file has."""
Config = Annotated[
    Path, typer.Option("--config", metavar="FILE", help="A replica's YAML, like those in configs/replica-*.yaml.")
]


def replica_command(
    config: Config,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs: a list of {name, about, argv, env, needs}.")
    ] = False,
) -> None:
    """Print the commands that start one replica: LMCache's server, the agent, vLLM.

    Run each in a shell, container or unit of its own, in the given order. The
    commands contain all that must be the same on all replicas, so that they share
    KV and the map is true: hashing, chunk size, TTLs, timeouts, KV events. This
    starts nothing.

    No password is printed. If the Redis has one, the commands read it, when they
    run, from the variable that holds its URL: KVGATE_REDIS_URL, or
    KVGATE_LMCACHE_URL if chunks go to another Redis than KVGate's keys.
    KVGATE_REPLICA_ID overrides the file's id, so that one file serves a fleet.

    \b
    Examples:
      kvgate replica-command --config configs/replica-lmcache-redis.yaml
      KVGATE_REPLICA_ID=r7 kvgate replica-command --config replica.yaml
      KVGATE_REDIS_URL=rediss://kvgate:PASSWORD@redis:6379 \\
          kvgate replica-command --config replica.yaml
      kvgate replica-command --config replica.yaml --json \\
          | jq '.[] | select(.name == "vllm").argv'
    """
    from gateway.ops.replica.commands import as_json as to_json
    from gateway.ops.replica.commands import as_shell, commands
    from gateway.ops.replica.settings import load_replica
    from gateway.settings.config_file import SettingsError

    try:
        found = commands(load_replica(config, os.environ))
    except SettingsError as error:
        is_without = any(problem.startswith("vllm: is missing") for problem in error.problems)
        if is_without and any(problem.startswith(_OF_A_GATEWAY) for problem in error.problems):
            looks = f"this looks like a gateway's file: kvgate check-config {config} checks it"
            raise CommandError(f"{config}: {looks}. A replica's file is like those in configs/replica-*.yaml") from None
        raise refused(config, error) from None
    typer.echo(json.dumps(to_json(found), indent=2) if as_json else as_shell(found), nl=as_json)
