"""The command `kvgate owners`: which replicas hold a prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.ops.cli.errors import CommandError, base_url

_TIMEOUT_S = 10.0


def owners(
    body: Annotated[
        str | None, typer.Argument(metavar="[-]", help="`-` reads an OpenAI request body, as JSON, from stdin.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The prompt: one message of a user.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    model: Annotated[str | None, typer.Option(help="The model, for --text and --file.")] = None,
    gateway: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A gateway's own address.", show_default="the state directory's cluster"),
    ] = None,
    state_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder with the cluster's files and logs.")
    ] = Path(".kvgate"),
    api_key: Annotated[
        str | None, typer.Option(envvar="KVGATE_API_KEY", help="An admin key, where gateways ask for one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the gateway's answer as it is.")] = False,
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
    url = base_url("--gateway", gateway) if gateway else _gateway_of(state_dir)
    explanation = _explain(url, request, api_key)
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


def _gateway_of(state_dir: Path) -> str:
    from gateway.ops.local.state_dir import read_cluster

    return read_cluster(state_dir).url


def _explain(gateway: str, body: bytes, api_key: str | None) -> dict[str, Any]:
    """The gateway's explanation (POST /v1/route/explain) of an OpenAI request body."""
    import httpx

    url = f"{gateway}/v1/route/explain"
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        response = httpx.post(url, content=body, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        explanation: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"no answer from {url}: {error or type(error).__name__}; is the cluster up?") from None
    except ValueError:
        raise CommandError(f"{url} answered {response.status_code}, but not like a gateway") from None
    if response.status_code != 200:
        fix = " Give an admin key by --api-key or KVGATE_API_KEY." if response.status_code in (401, 403) else ""
        raise CommandError(f"the gateway refused ({response.status_code}): {_message_in(explanation)}{fix}")
    return explanation


def _message_in(error_body: Any) -> str:
    try:
        return str(error_body["error"]["message"])
    except (LookupError, TypeError):
        return json.dumps(error_body)[:200]
