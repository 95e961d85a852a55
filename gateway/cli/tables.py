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
# What explain tells of each replica, and how the table heads it.
_COST_TERMS = (
    ("replica", "replica"),
    ("cost", "cost"),
    ("matched_tokens", "matched"),
    ("charged_tokens", "3 x charged"),
    ("displaced_tokens", "displaced"),
    ("backlog_tokens", "backlog"),
    ("load_tokens", "load"),
    ("active", "active requests"),
    ("owned_tokens", "owned"),
    ("guarded", "above the load guard"),
)
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
    console.print("\nwhere it would go now (costs in tokens)")
    terms = [
        (name, label) for name, label in _COST_TERMS if any(name in replica for replica in explanation["replicas"])
    ]
    costs = Table(*(label for _, label in terms), box=None, pad_edge=False)
    for replica in explanation["replicas"]:
        costs.add_row(*(_cell(replica.get(name)) for name, _ in terms))
    if terms:
        console.print(costs)
    choice = explanation["choice"]
    where = choice.get("replica") or "the first usable of " + ", ".join(choice.get("order", ["none"]))
    console.print(f"→ {where}: {choice['why']}, policy {choice.get('policy', '-')}", markup=False)


def _cell(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) else escape(str(value))


def _owner(owner: dict[str, Any]) -> str:
    stale = ", of a past incarnation" if owner["stale"] else ""
    return escape(f"{owner['replica']} ({owner['kind']}, {owner['medium']}, {owner['hits']} hits{stale})")
