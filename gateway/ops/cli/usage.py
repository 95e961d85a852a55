"""kvgate usage: what requests took and cost."""

from __future__ import annotations

import json
from typing import Annotated
from urllib.parse import urlencode

import typer

from gateway.ops.cli.ask import ask, ask_text, gateway_url
from gateway.ops.cli.options import DEFAULT_STATE_DIR, ApiKey, AsJson, Gateway, StateDir

_FREE = (
    "Nothing has cost anything: no model of these requests has a price. Prices are in the gateways' configuration, "
    "under billing.prices."
)


def usage(
    first: Annotated[
        str | None,
        typer.Option("--from", metavar="TIME", help="A month, a day or an hour.", show_default="this month"),
    ] = None,
    last: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="The last one, which counts.", show_default="today")
    ] = None,
    by: Annotated[str, typer.Option(metavar="hour|day|month", help="A row for each.")] = "month",
    group: Annotated[
        str, typer.Option(metavar="NAMES", help='Some of tenant, key, model, with commas; "": none.')
    ] = "tenant,model",
    tenant: Annotated[str | None, typer.Option(help="Only this one.", show_default="all that your key sees")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, for a file that you keep.")] = False,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show what requests took and cost, with totals: the bill.

    A key sees its tenant, an admin's key all. Times are those of the gateways'
    billing.time_zone. The last second is not there yet.

    \b
    Examples:
      kvgate usage
      kvgate usage --from 2026-11 --to 2026-11 --group tenant
      kvgate usage --by day --tenant research --group key,model
      kvgate usage --from 2026-10 --to 2026-10 --by day --group tenant,key,model --csv > 2026-10.csv
    """
    wanted = {"from": first, "to": last, "by": by, "group": group, "tenant": tenant}
    query = {name: text for name, text in wanted.items() if text is not None}
    url = f"{gateway_url(gateway, state_dir)}/v1/usage?"
    if as_csv:
        typer.echo(ask_text(url + urlencode(query | {"format": "csv"}), api_key, "text/csv"), nl=False)
        return
    answer = ask("GET", url + urlencode(query), api_key, "totals")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    if not answer["rows"]:
        typer.echo(f"No requests from {answer['from']} to {answer['to']} ({answer['time_zone']}).")
        return
    from gateway.ops.cli.tables import print_usage

    print_usage(answer)
    if not answer["totals"]["cost"]:
        typer.echo(_FREE, err=True)
