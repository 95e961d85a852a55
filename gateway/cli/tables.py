"""The tables that `kvgate status` and `kvgate owners` print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.local.status import MemberStatus

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
    Console(highlight=False, soft_wrap=True).print(table)


def print_owners(explanation: dict[str, Any]) -> None:
    """Print the answer of /v1/route/explain: the chain, shallow to deep, with each key's owners, and the choice."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"pool {escape(str(explanation['pool']))}, model {escape(str(explanation['model']))}")
    table = Table("key", "tokens", "text bytes", "images", "owners", box=None, pad_edge=False)
    for key in explanation["chain"]:
        owners = ", ".join(_owner(owner) for owner in key["owners"])
        table.add_row(key["key"], str(key["tokens"]), str(key["text_bytes"]), str(key["images"]), owners or "-")
    console.print(table)
    console.print("\nWhere it would go now")
    choice = explanation["choice"]
    for row in (*explanation["replicas"], choice):
        console.print(("  → " if row is choice else "    ") + escape(_terms(row)))


def _owner(owner: dict[str, Any]) -> str:
    return escape(f"{owner['replica']} ({owner['kind']}, {owner['medium']}, {owner['hits']} hits)")


def _terms(row: dict[str, Any] | None) -> str:
    """A replica's cost or the choice, as the gateway names its terms."""
    return ", ".join(f"{name} {value}" for name, value in row.items()) if row else "no replica can serve it"
