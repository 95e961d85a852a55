"""Commands for API keys: keys create, keys list, keys rotate, keys revoke, audit."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gateway.ops.cli.ask import ask, gateway_url
from gateway.ops.cli.options import DEFAULT_STATE_DIR, ApiKey, AsJson, Gateway, StateDir
from gateway.ops.cli.printable import all_printable, printable

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
_DONE = {"create": "created", "rotate": "rotated", "revoke": "revoked", "add": "added", "remove": "removed"}
KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key's id; kvgate keys list shows it.")]
Days = Annotated[
    float | None, typer.Option(help="How long it is valid, at most 365 days and not longer than your own key.")
]
_LIMITS = {"concurrency": "in flight", "requests_per_min": "requests/min", "tokens_per_min": "tokens/min"}


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the key is called, for people.")],
    tenant: Annotated[str | None, typer.Option(help="Whose key it is.", show_default="that of your key")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model that it may use; several times for several.", show_default="those of your key"),
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Its requests in flight; more are queued.")] = None,
    requests_per_min: Annotated[int | None, typer.Option(min=1, help="More get a 429.")] = None,
    tokens_per_min: Annotated[int | None, typer.Option(min=1, help="Uncached and generated; more get a 429.")] = None,
    budget: Annotated[
        list[str] | None, typer.Option(help="What it may spend, like month=100.00 or day=1000000tokens; several times.")
    ] = None,
    expires_days: Days = None,
    admin: Annotated[bool, typer.Option("--admin", help="It may operate the cluster.")] = False,
    manages_keys: Annotated[bool, typer.Option("--manages-keys", help="It may make keys of its tenant.")] = False,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Make an API key. It is shown once; all gateways know it within a second.

    Without --expires-days it is valid for 90 days, or as long as your own key if
    that ends before. Its limits and budgets hold over all gateways, beside its
    tenant's.

    \b
    Examples:
      kvgate keys create batch --tenant research --requests-per-min 60
      kvgate keys create ci --tenant research --model small --expires-days 7
      kvgate keys create intern --budget month=100.00 --budget day=1000000tokens
      kvgate keys create team-lead --tenant research --manages-keys
    """
    limits = {"concurrency": concurrency, "requests_per_min": requests_per_min, "tokens_per_min": tokens_per_min}
    limits = {field: value for field, value in limits.items() if value is not None}
    wanted = {
        "name": name,
        "tenant": tenant,
        "models": model or None,
        "limits": limits or None,
        "budgets": [_budget(text) for text in budget or ()] or None,
        "expires_days": expires_days,
    }
    body = {"admin": admin, "manages_keys": manages_keys} | {
        field: value for field, value in wanted.items() if value is not None
    }
    _show_secret(ask("POST", _url(gateway, state_dir), api_key, "key", json.dumps(body).encode()), as_json)


@app.command("list")
def list_keys(
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List the API keys: their ids, names, tenants, rights, limits and ends.

    Those of the configuration are `configured`; change them in the file.

    \b
    Examples:
      kvgate keys list
      kvgate keys list --json
    """
    answer = ask("GET", _url(gateway, state_dir), api_key, "keys")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    from gateway.ops.cli.tables import print_keys

    answer = all_printable(answer)
    print_keys([_row(key, answer["currency"]) for key in answer["keys"]])


def _budget(text: str) -> dict[str, Any]:
    """Raises typer.BadParameter."""
    per, _, amount = text.partition("=")
    is_tokens = amount.endswith("tokens")
    try:
        number = int(amount.removesuffix("tokens")) if is_tokens else float(amount)
    except ValueError:
        number = 0
    if per not in ("day", "week", "month") or not 0 < number < math.inf:
        message = f"{text!r}: write day, week or month, and money or tokens, like month=100.00 or day=1000000tokens"
        raise typer.BadParameter(message, param_hint="--budget")
    return {"per": per, "tokens" if is_tokens else "money": number}


def _row(key: dict[str, Any], currency: str) -> list[str]:
    rights = ", ".join(name for name in ("admin", "manages_keys") if key[name])
    models = "all" if key["models"] is None else ", ".join(key["models"])
    told = [f"{key['limits'][name]} {words}" for name, words in _LIMITS.items() if name in key["limits"]]
    told += [_budget_told(budget, currency) for budget in key["budgets"]]
    row = [key["id"], key["name"], key["tenant"], key["state"], _time(key["expires_ms"]), models, ", ".join(told)]
    return [*row, rights, key.get("in_place_of") or ""]


def _budget_told(budget: dict[str, Any], currency: str) -> str:
    amount = f"{budget['money']:.12g} {currency}" if "money" in budget else f"{budget['tokens']} tokens"
    return f"{amount}/{budget['per']}"


@app.command()
def rotate(
    key_id: KeyId,
    overlap_hours: Annotated[
        float, typer.Option(min=0, max=720, help="How long the old key stays valid, unless it ends before.")
    ] = 24,
    expires_days: Days = None,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Make another key in the place of one. Both are valid for a while.

    The new key has the same name, tenant, models, limits, budgets and rights. Both
    share one account of the limits and budgets. It is shown once.
    Without --expires-days it is valid for 90 days, or as long as your own key if
    that ends before, however long the old one was. If the old key was stolen, use
    --overlap-hours 0, or revoke it.

    \b
    Examples:
      kvgate keys rotate k-0123456789abcdef
      kvgate keys rotate k-0123456789abcdef --overlap-hours 1 --expires-days 30
    """
    body: dict[str, Any] = {"overlap_s": overlap_hours * 3600}
    if expires_days is not None:
        body["expires_days"] = expires_days
    url = f"{_url(gateway, state_dir)}/{quote(key_id, safe='')}/rotate"
    _show_secret(ask("POST", url, api_key, "key", json.dumps(body).encode()), as_json)


@app.command()
def revoke(
    key_id: KeyId,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
) -> None:
    """Make a key invalid at all gateways, within a second, and for ever.

    The keys that it has made end with it. Running requests go on; requests that
    wait are refused.

    \b
    Examples:
      kvgate keys revoke k-0123456789abcdef
    """
    url = f"{_url(gateway, state_dir)}/{quote(key_id, safe='')}"
    answer = all_printable(ask("DELETE", url, api_key, "state"))
    typer.echo(f"{answer['name']} ({answer['id']}) of {answer['tenant']} is {answer['state']}")
    if answer["also_revoked"]:
        typer.echo(f"with the keys that it has made: {', '.join(answer['also_revoked'])}")


def audit(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="So many changes, the newest ones.")] = 100,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show who has changed which API key or replica, the newest change first.

    \b
    Examples:
      kvgate audit
      kvgate audit --limit 1000 --json
    """
    answer = ask("GET", f"{gateway_url(gateway, state_dir)}/v1/audit?limit={limit}", api_key, "entries")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    for entry in all_printable(answer["entries"]):
        whose = f" of tenant {entry['tenant']}" if entry["tenant"] else ""
        verb, _, what = entry["what"].partition(" ")
        told = f"{_DONE.get(verb, verb)} {what} {entry['subject']}{whose}"
        typer.echo(f"{_time(entry['at_ms'])}  {entry['who']} {told}")


def _url(gateway: str | None, state_dir: Any) -> str:
    return f"{gateway_url(gateway, state_dir)}/v1/keys"


def _show_secret(answer: dict[str, Any], as_json: bool) -> None:
    """The key on stdout, for a pipe; what it is on stderr."""
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    typer.echo(printable(str(answer["key"])))
    told = all_printable(answer)
    typer.echo(f"{told['name']} ({told['id']}) of {told['tenant']}, until {_time(told['expires_ms'])}", err=True)
    if "replaces" in told:
        old = told["replaces"]
        typer.echo(f"It replaces {old['id']}, which is valid until {_time(old['expires_ms'])}.", err=True)
    typer.echo("Keep it: it is shown only now.", err=True)


def _time(at_ms: int | None) -> str:
    return "-" if at_ms is None else datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
