"""Commands that change which replicas there are, while the gateways run: kvgate replicas add, remove, list."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gateway.ops.cli.ask import ask, gateway_url
from gateway.ops.cli.operate import Replica, wait_until_drained
from gateway.ops.cli.options import DEFAULT_STATE_DIR, ApiKey, AsJson, Gateway, StateDir
from gateway.ops.cli.printable import all_printable
from gateway.ops.errors import CommandError

app = typer.Typer(
    name="replicas",
    help="Add and remove replicas while the gateways run, and list all.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def add(
    replica: Replica,
    url: Annotated[str, typer.Argument(metavar="URL", help="Its vLLM's address, without /v1.")],
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="A label; repeatable.")
    ] = None,
    dp_rank: Annotated[
        int | None, typer.Option(min=0, help="Its data-parallel rank, if its server has several.")
    ] = None,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
) -> None:
    """Add a replica, at all gateways, within a second.

    It gets requests from its first good health check on. Its agent needs the same
    id as --replica. It is kept in Redis, signed: gateways need the same
    security.records_secret. What their configuration lists goes first.

    \b
    Examples:
      kvgate replicas add r5 http://10.0.0.9:8000
      kvgate replicas add r6 http://10.0.0.10:8000 --label version=v2
    """
    labels = dict(one.partition("=")[::2] for one in label or ())
    if not all("=" in one for one in label or ()):
        raise CommandError("--label: give it as NAME=VALUE")
    told = {"id": replica, "url": url, "labels": labels} | ({} if dp_rank is None else {"dp_rank": dp_rank})
    body = json.dumps(told).encode()
    ask("POST", f"{gateway_url(gateway, state_dir)}/v1/replicas", api_key, "id", body)
    typer.echo(f"{replica} is added; it gets requests when it answers: kvgate replicas list")


def remove(
    replica: Replica,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when it has no request and its keys are forgotten.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=0, help="With --wait: give up after so many seconds; 0: never.")] = 0,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
) -> None:
    """Remove a replica that was added.

    It gets no new requests, and running ones finish. Then stop its vLLM.

    \b
    Examples:
      kvgate replicas remove r5
      kvgate replicas remove r5 --wait --timeout-s 600
    """
    url = f"{gateway_url(gateway, state_dir)}/v1/replicas/{quote(replica, safe='')}"
    answer = all_printable(ask("DELETE", url, api_key, "state"))
    if wait and answer["state"] == "draining":
        wait_until_drained(replica, url, api_key, timeout_s, done="is removed")
    else:
        typer.echo(f"{replica} is removed; in flight: {answer['active_requests']}")


def list_all(
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List all replicas, where each comes from, and how it is.

    \b
    Examples:
      kvgate replicas list
      kvgate replicas list --json
    """
    answer: dict[str, Any] = ask("GET", f"{gateway_url(gateway, state_dir)}/v1/replicas", api_key, "replicas")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    from gateway.ops.cli.tables import print_replicas

    print_replicas(answer)


for _name, _command in (("add", add), ("remove", remove), ("list", list_all)):
    _summary = (_command.__doc__ or "").partition("\n")[0]
    app.command(_name, short_help=_summary)(_command)
