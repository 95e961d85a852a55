"""The command `kvgate`. Each module holds some of its commands and imports what these need when they run, so that
`kvgate --help` stays quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gateway.cli import cluster, config, doctor, follow, owners, replica, serve
from gateway.cli.errors import CommandError
from gateway.local.errors import ClusterError

app = typer.Typer(
    name="kvgate",
    help="An OpenAI-compatible gateway cluster for vLLM: several stateless gateways that route as one.",
    epilog="Start with: kvgate up",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(cluster.up)
app.command()(cluster.down)
app.command()(cluster.status)
app.command()(owners.owners)
app.command()(doctor.doctor)
app.command()(serve.gateway)
app.command()(follow.agent)
app.command()(follow.coordinator)
app.command()(serve.replica_sim)
app.command()(replica.replica_command)
app.command()(config.check_config)
app.command()(config.hash_key)
app.command()(config.version)


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
    except (CommandError, ClusterError) as error:
        typer.echo(f"kvgate: {error}", err=True)
        sys.exit(1)
