"""The command `kvgate`. Each module holds some of its commands and imports what these need when they run, so that
`kvgate --help` stays quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gateway.ops.cli import (
    config,
    doctor,
    explain,
    follow,
    keys,
    operate,
    owners,
    replica,
    replicas,
    serve,
    usage,
    watch,
)
from gateway.ops.cli import local_cluster as cluster
from gateway.ops.cli.printable import printable_lines
from gateway.ops.errors import CommandError

app = typer.Typer(
    name="kvgate",
    help="An OpenAI-compatible gateway cluster for vLLM: several stateless gateways that route as one.",
    epilog="Start with: kvgate up",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich cuts options to the terminal's width, and breaks examples
    pretty_exceptions_enable=False,
)

_COMMANDS = (
    cluster.up,
    cluster.down,
    cluster.status,
    owners.owners,
    explain.explain,
    watch.watch,
    usage.usage,
    operate.queue,
    operate.budgets,
    operate.drain,
    operate.undrain,
    keys.audit,
    doctor.doctor,
    serve.gateway,
    serve.picker,
    follow.agent,
    serve.replica_sim,
    replica.replica_command,
    config.check_config,
    config.hash_key,
)
for command in _COMMANDS:
    # Given explicitly, because Typer cuts a docstring's first line to its width.
    summary = (command.__doc__ or "").partition("\n")[0]
    app.command(short_help=summary)(command)


app.add_typer(replicas.app, short_help="Add, remove and list replicas while gateways run.")
app.add_typer(
    keys.app,
    name="keys",
    short_help="Make, list, replace and revoke API keys.",
    help="Make, list, replace and revoke API keys while gateways run.",
)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=config.print_version, is_eager=True),
    ] = False,
) -> None:
    """Only `--version`; everything else belongs to a command."""


def main() -> None:
    """The entry point: mistakes of the user end in one line on stderr and exit code 1."""
    try:
        app()
    except CommandError as error:
        typer.echo(f"kvgate: {printable_lines(str(error))}", err=True)
        sys.exit(1)
