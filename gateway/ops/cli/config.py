"""Commands around configuration: check-config, hash-key, --version."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.ops.errors import CommandError

if TYPE_CHECKING:
    from gateway.settings.config_file import SettingsError
    from gateway.settings.gateway_settings import GatewaySettings

_RANDOM_KEY = "openssl rand -hex 32"
_SHORT_CHARS = 16
# The options of settings that have other names there.
_OPTIONS = {"redis.url": "redis-url", "redis.namespace": "redis-namespace", "id": "replica"}
_NO_START = ": a gateway would not start on this machine"


def load(path: Path | list[Path]) -> GatewaySettings:
    """The settings in files, overridden by this process' environment. A CommandError lists every problem."""
    import os

    from gateway.settings.config_file import SettingsError
    from gateway.settings.gateway_settings import load_settings

    try:
        return load_settings(path, os.environ)
    except SettingsError as error:
        raise refused(path if isinstance(path, Path) else " and ".join(map(str, path)), error) from None


def of_options(
    redis_url: str, namespace: str, log: Mapping[str, str] = {}, env: Mapping[str, str] = {}
) -> GatewaySettings:
    """A gateway's settings from the options of a command. Raises SettingsError."""
    from gateway.settings.gateway_settings import build_settings

    return build_settings({"redis": {"url": redis_url, "namespace": namespace}, "log": {**log}}, env)


@contextmanager
def named_by_option() -> Iterator[None]:
    """Turns a SettingsError in the context into a CommandError, with each field's option in its place."""
    from gateway.settings.config_file import SettingsError

    try:
        yield
    except SettingsError as error:
        fields = (problem.partition(": ") for problem in error.problems)
        named = (f"--{_OPTIONS.get(field, field)}: {what}" for field, _, what in fields)
        raise CommandError("; ".join(named)) from None


def refused(files: Path | str, error: SettingsError) -> CommandError:
    """The error for files that cannot be used: a line for each problem."""
    return CommandError(f"{files}: {error.listed()}")


def counted(number: int, what: str) -> str:
    """Like `1 replica` or `2 replicas`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def check_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A gateway's YAML configuration.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 also if there is a warning, or no replica.")
    ] = False,
) -> None:
    """Check a configuration, field by field.

    Each problem has a line of its own. The exit code is 1 if there is one. What can be used but
    contradicts itself, or is missing on this machine, is only a warning.

    \b
    Examples:
      kvgate check-config configs/gateway.yaml
      kvgate check-config --strict gateway.yaml
      KVGATE_ID=gw7 kvgate check-config gateway.yaml
    """
    settings = load(file)
    warnings = [*_obstacles_to(settings), *contradictions_in(settings)]
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    if warnings and strict:
        raise typer.Exit(1)
    followed = [name for name, section in settings.discovery if section is not None]
    replicas = counted(len(settings.replicas), "replica") + (f", more by {' and '.join(followed)}" if followed else "")
    typer.echo(f"{file}: OK (gateway {settings.id}, {replicas}, policy {settings.policy.name})")
    has_none = not settings.replicas and not followed
    if has_none:
        typer.echo(
            "no replicas here: kvgate up --config brings its own; kvgate gateway needs `replicas`, `discovery`, or "
            "kvgate replicas add"
        )
    _tell_of_records(settings)
    raise typer.Exit(int(strict and has_none))


def _tell_of_records(settings: GatewaySettings) -> None:
    """What is not there may be meant so, or be in the gateways' environment: so it is no warning."""
    security = settings.security
    if security.records_secret is None and any(key.admin or key.manages_keys for key in security.api_keys):
        typer.echo(
            "no records_secret here: gateways refuse kvgate keys and kvgate replicas add, unless they have "
            "KVGATE_RECORDS_SECRET (kvgate up makes one)"
        )


def _obstacles_to(settings: GatewaySettings) -> Iterator[str]:
    """What is missing on this machine. A gateway that starts ends with the first of these."""
    import os

    from gateway.access_log import STDOUT
    from gateway.tls import BadCertificate, of_listener, towards_replicas
    from gateway.tracing.otel_variables import BadVariable
    from gateway.tracing.tracing import variables_for

    log = settings.log.access_log
    if log is not None and log != STDOUT and not Path(log).parent.is_dir():
        yield f"log.access_log: the folder of {log!r} is not there{_NO_START}"
    for load_files, files in ((of_listener, settings.tls), (towards_replicas, settings.replica_tls)):
        try:
            load_files(files)
        except BadCertificate as error:
            yield f"{error}{_NO_START}"
    try:
        variables_for(settings.tracing, os.environ)
    except BadVariable as error:
        yield f"{error}{_NO_START}"


def contradictions_in(settings: GatewaySettings) -> Iterator[str]:
    """What can be used, and most likely does not do what was meant."""
    from urllib.parse import urlsplit

    from gateway.doctor.checks.tenants import findings
    from gateway.settings.tracing_settings import TracingSettings

    tracing = settings.tracing
    if tracing.endpoint is None and tracing != TracingSettings():
        yield "tracing: nothing is traced without tracing.endpoint"
    elif tracing.endpoint is not None and not urlsplit(tracing.endpoint).path.strip("/"):
        yield "tracing.endpoint: has no path; OpenTelemetry's receivers take traces at /v1/traces"
    for finding in findings(settings):
        yield f"{finding.subject}: {finding.sentence}"


def hash_key() -> None:
    """Turn an API key, read from stdin, into the line that the configuration holds instead of it.

    \b
    Examples:
      openssl rand -hex 32 | tee key.txt | kvgate hash-key
      kvgate hash-key        (asks for the key without showing it)
    """
    import hashlib

    key = typer.prompt("API key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.read()
    key = key.strip()
    if not key:
        raise CommandError(f"no key on stdin; pipe one in, like: {_RANDOM_KEY} | kvgate hash-key")
    if any(character.isspace() for character in key):
        raise CommandError("a key holds no white space; pipe in one key alone")
    if len(key) < _SHORT_CHARS:
        typer.echo(f"kvgate: a key of {counted(len(key), 'character')} can be guessed; better: {_RANDOM_KEY}", err=True)
    # Quoted, because YAML reads a digest of digits with one 'e' as a number.
    typer.echo(f'sha256: "{hashlib.sha256(key.encode()).hexdigest()}"')


def print_version(wanted: bool) -> None:
    if wanted:
        from gateway import __version__

        typer.echo(__version__)
        raise typer.Exit
