"""The command `kvgate owners`: which replicas hold a prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.ops.cli.ask import ask, gateway_url
from gateway.ops.cli.options import DEFAULT_STATE_DIR, ApiKey, AsJson, Gateway, StateDir
from gateway.ops.errors import CommandError


def owners(
    body: Annotated[
        str | None, typer.Argument(metavar="-", help="`-` reads an OpenAI request body, as JSON, from stdin.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The prompt: one message of a user.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    model: Annotated[str | None, typer.Option(help="The model, for --text and --file.")] = None,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Print a prompt's prefix keys, the owners of each, and where a request would go now.

    Nothing is placed and nothing changes: the gateway only explains.

    \b
    Examples:
      kvgate owners --model sim --text 'Hello'
      kvgate owners --model sim --file prompt.txt --json
      kvgate owners --gateway http://127.0.0.1:8080 - < request.json
    """
    request = _request_body(body, text, file, model)
    explanation = ask("POST", f"{gateway_url(gateway, state_dir)}/v1/route/explain", api_key, "chain", request)
    if as_json:
        typer.echo(json.dumps(explanation, indent=2))
        return
    from gateway.ops.cli.tables import print_owners

    print_owners(explanation)


def _request_body(body: str | None, text: str | None, file: Path | None, model: str | None) -> bytes:
    if sum(source is not None for source in (body, text, file)) != 1:
        raise CommandError("give the prompt once: --text TEXT, --file FILE, or - for a request body on stdin")
    if body is not None:
        if body != "-":
            raise CommandError(f"{body!r} is not understood; - reads a request body from stdin")
        return sys.stdin.buffer.read()
    if model is None:
        raise CommandError("--model is needed with --text and --file; GET /v1/models lists what the cluster serves")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"{file} cannot be read: {error}") from None
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
