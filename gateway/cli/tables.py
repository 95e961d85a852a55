"""The tables that `kvgate status` and `kvgate owners` print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.local.status import MemberStatus

# Wide enough for any row: a terminal wraps what it must, a program that reads the output needs whole lines.
_WIDTH = 1000
_COLOURS = {"ready": "green", "not ready": "yellow", "dead": "red"}


def print_status(members: Iterable[MemberStatus]) -> None:
    table = Table("kind", "id", "state", "pid", "url", "detail", box=None, pad_edge=False)
    for member in members:
        table.add_row(
            member.kind,
            member.id,
            f"[{_COLOURS[member.state]}]{member.state}[/]",
            str(member.pid or "-"),
            escape(member.url),
            escape(member.detail),
        )
    Console(highlight=False, width=_WIDTH).print(table)


def print_owners(explanation: dict[str, Any]) -> None:
    """Print the answer of /v1/route/explain: the chain, shallow to deep, with each key's owners, and the choice."""
    console = Console(highlight=False, width=_WIDTH)
    console.print(f"pool {explanation['pool']}, model {explanation['model']}", markup=False)
    if "reason" in explanation:  # without the store there are no owners to show
        console.print(f"store: {explanation['store']} ({explanation['reason']})", markup=False)
    table = Table("key", "tokens", "text bytes", "images", "owners", box=None, pad_edge=False)
    for key in explanation["chain"]:
        owners = ", ".join(_owner(owner) for owner in key["owners"])
        table.add_row(key["key"], str(key["tokens"]), str(key["text_bytes"]), str(key["images"]), owners or "-")
    console.print(table)
    console.print("\nwhere it would go now")
    for replica in explanation["replicas"]:
        console.print(f"  {_terms(replica, ('replica', 'cost'))}", markup=False)
    console.print(f"→ {_terms(explanation['choice'], ('replica', 'why'))}", markup=False)


def _owner(owner: dict[str, Any]) -> str:
    stale = ", of a past incarnation" if owner["stale"] else ""
    return escape(f"{owner['replica']} ({owner['kind']}, {owner['medium']}, {owner['hits']} hits{stale})")


def _terms(row: dict[str, Any], first: tuple[str, ...]) -> str:
    """A cost or choice as the gateway names its terms, those that tell most `first`, the others by name."""
    names = [*(name for name in first if name in row), *sorted(row.keys() - first)]
    return ", ".join(f"{name} {row[name]}" for name in names)
