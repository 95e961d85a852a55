"""Prints the results of `kvgate status`, `keys list`, `usage`, `owners`, `explain`, `queue`, `doctor` and others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.doctor.examine import Diagnosis
from gateway.ops.cli.config import counted
from gateway.ops.cli.printable import all_printable, printable
from gateway.ops.local.cluster_status import MemberStatus

# Wide enough for any row. A terminal wraps long lines itself; a program that reads the output needs whole lines.
_WIDTH = 1000
# The fields of each replica in the answer of explain and in a record, and their headings.
_COST_TERMS = (
    ("replica", "replica"),
    ("cost", "cost"),
    ("matched_tokens", "matched"),
    ("charged_tokens", "to compute"),
    ("displaced_tokens", "displaced"),
    ("backlog_tokens", "backlog"),
    ("load_tokens", "load"),
    ("speed", "speed"),
    ("active", "active requests"),
    ("active_requests", "active requests"),
    ("owned_tokens", "owned"),
    ("guarded", "too busy (load guard)"),
)
_OF_USAGE = {
    "requests": "requests",
    "errors": "errors",
    "uncached_tokens": "uncached tokens",
    "cached_tokens": "cached tokens",
    "output_tokens": "output tokens",
    "images": "images",
}
"""The counts of /v1/usage, and their headings."""
_LEGEND = (
    "cost = 3 x to compute + displaced + backlog + load; if the replicas are not equally fast, divided by its speed\n"
    "to compute: tokens of the prompt (of a prefix that requests share, only a part); displaced: tokens for which its "
    "cache has no room; backlog: prompt tokens that wait there; load: what its requests in flight cost"
)
_COLOURS = {"ready": "green", "not ready": "yellow", "dead": "red", "warning": "yellow", "error": "red"}


def _console() -> Console:
    return Console(highlight=False, width=_WIDTH)


def _table(*headings: str) -> Table:
    return Table(*headings, box=None, pad_edge=False)


def print_status(members: Iterable[MemberStatus]) -> None:
    table = _table("kind", "id", "state", "pid", "url", "detail")
    for member in members:
        name, url, detail = (escape(printable(text)) for text in (member.id, member.url, member.detail))
        state = f"[{_COLOURS[member.state]}]{member.state}[/]"
        table.add_row(member.kind, name, state, str(member.pid or "-"), url, detail)
    _console().print(table)


def print_keys(rows: Iterable[list[str]]) -> None:
    table = _table("id", "name", "tenant", "state", "until", "models", "limits", "rights", "in place of")
    for row in rows:
        table.add_row(*map(escape, row))
    _console().print(table)


def print_usage(answer: dict[str, Any]) -> None:
    """Print the answer of /v1/usage: a row for each time and group, then the totals."""
    answer = all_printable(answer)
    names = ("time", *answer["group"])
    saves = bool(answer["totals"]["saved"])
    shown = [name for name in _OF_USAGE if answer["totals"][name] or name == "requests"]
    money = [*(("cost",) if answer["totals"]["cost"] else ()), *(("saved",) if saves else ())]
    table = Table(box=None, pad_edge=False)
    for name in (f"time ({answer['time_zone']})", *answer["group"]):
        table.add_column(name)
    for name in (*shown, *money):
        table.add_column(_OF_USAGE.get(name, f"{name} {answer['currency']}"), justify="right")
    for row in (*answer["rows"], dict.fromkeys(names, "") | {"time": "total"} | answer["totals"]):
        counts = [f"{row[name]:,}" for name in shown] + [f"{row[name]:,.6f}" for name in money]
        table.add_row(*(escape(row[name] or "-") if row["time"] != "total" else row[name] for name in names), *counts)
    _console().print(table)


def print_budgets(answer: dict[str, Any]) -> None:
    """Print the answer of /v1/budgets."""
    answer = all_printable(answer)
    table, amounts = _table("tenant", "key", "per", "unit"), ("budget", "spent", "reserved", "left")
    for name in amounts:
        table.add_column(name, justify="right")
    table.add_column(f"opens again ({answer['time_zone']})")
    for one in answer["budgets"]:
        is_money = one["unit"] == "money"
        shown = [f"{one[name]:,.4f}" if is_money else f"{one[name]:,}" for name in amounts]
        opens = datetime.fromisoformat(one["opens_again"]).strftime("%Y-%m-%d %H:%M")
        unit = answer["currency"] if is_money else "tokens"
        table.add_row(*map(escape, [one["tenant"], one["key"] or "-", one["per"], unit, *shown, opens]))
    _console().print(table)


def print_owners(explanation: dict[str, Any]) -> None:
    """Print the answer of /v1/route/explain: the chain, shallow to deep, with each key's owners, and the choice."""
    console, explanation = _console(), all_printable(explanation)
    backend = f", backend {explanation['backend']}" if "backend" in explanation else ""
    console.print(f"pool {explanation['pool']}, model {explanation['model']}{backend}", markup=False)
    if "reason" in explanation:  # there is no store, so no owners are known
        console.print(f"store: {explanation['store']} ({explanation['reason']})", markup=False)
    table = _table("key", "tokens", "text bytes", "images", "owners")
    for key in explanation["chain"]:
        owners = ", ".join(_owner(owner) for owner in key["owners"])
        table.add_row(key["key"], str(key["tokens"]), str(key["text_bytes"]), str(key["images"]), owners or "-")
    console.print(table)
    console.print("\nwhere it would go now (costs in tokens)")
    print_costs(explanation["replicas"])
    choice = explanation["choice"]
    where = choice.get("replica") or "the first usable of " + ", ".join(choice.get("order", ["none"]))
    console.print(f"→ {where}: {choice['why']}, policy {choice.get('policy', '-')}{_wait_of(choice)}", markup=False)


def print_costs(replicas: Sequence[dict[str, Any]]) -> None:
    """Print what each replica costs, with the terms of it."""
    terms = {name: label for name, label in _COST_TERMS if any(name in each for each in replicas)}
    costs = _table(*terms.values())
    for replica in replicas:
        costs.add_row(*(_cell(replica.get(name)) for name in terms))
    if terms:
        _console().print(costs)
        _console().print(_LEGEND, markup=False)


_WAITS = {
    "no_room": "no replica has room",
    "room_share": "its band has used its part of the room (room_share)",
    "others_wait": "others wait who go first",
    "prefers": "the replica that holds its prompt is full, and it waits a little for this one",
    "concurrency": "its tenant has as many requests in flight as it may have",
}


def _wait_of(choice: dict[str, Any]) -> str:
    """What a request would wait for."""
    if choice["why"] == "held":
        return f"; it would be held for up to {choice['hold_s']:g} s, until a replica is ready"
    waits = choice.get("waits")
    if not waits:
        return ""
    for_s = f", about {waits['expected_ms'] / 1000:.1f} s" if waits["expected_ms"] else ""
    return f"; it would wait{for_s}: {_WAITS[waits['why']]}, {waits['ahead']} before it"


def print_queue(pool: dict[str, Any]) -> None:
    """Print who waits in a pool, and the room of its replicas."""
    console, pool = _console(), all_printable(pool)
    held = f", {pool['held_requests']} of these until a replica is ready" if pool["held_requests"] else ""
    console.print(f"pool {pool['pool']}: {counted(pool['waiting_requests'], 'request')} waiting{held}", markup=False)
    if pool["waiting"]:
        table = _table("band", "tenant", "waiting", "longest", "why")
        for line in pool["waiting"]:
            where = f" on {line['pinned']}" if line["pinned"] else ""
            tried = f" besides {', '.join(line['tried'])}, which failed" if line["tried"] else ""
            why = _WAITS.get(line["why"], line["why"]) + where + tried
            oldest = f"{line['oldest_s']:.1f} s"
            table.add_row(line["band"], escape(line["tenant"]), str(line["requests"]), oldest, escape(why))
        console.print(table)
    rooms = _table("replica", "state", "requests", "prompts ahead", "room")
    for room in pool["replicas"]:
        requests = str(room["active_requests"]) + (f" of {room['slots']}" if room["slots"] else "")
        ahead = f"{room['backlog_s']:.1f} s" + (f" of {room['max_wait_s']:g} s" if room["max_wait_s"] else "")
        rooms.add_row(room["replica"], room["state"], requests, ahead, "yes" if room["has_room"] else "no")
    console.print(rooms)


def _cell(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) else escape(str(value))


def _owner(owner: dict[str, Any]) -> str:
    stale = ", of a past incarnation" if owner["stale"] else ""
    return escape(f"{owner['replica']} ({owner['kind']}, {owner['medium']}, {owner['hits']} hits{stale})")


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the findings by subject, then what could not be checked, then the numbers of both."""
    console = Console(highlight=False, soft_wrap=True)
    for subject in dict.fromkeys(finding.subject for finding in diagnosis.findings):
        console.print(f"[bold]{escape(printable(subject))}[/]")
        for finding in (each for each in diagnosis.findings if each.subject == subject):
            head = f"[{_COLOURS[finding.severity]}]{finding.severity}[/] {finding.code}"
            console.print(f"  {head}: {escape(printable(finding.what))}")
            console.print(f"    why: {printable(finding.why)}\n    fix: {printable(finding.fix)}", markup=False)
    if diagnosis.unchecked:
        console.print("[bold]not checked[/]")
    for unchecked in diagnosis.unchecked:
        text = f"{unchecked.subject}: {unchecked.what} ({unchecked.why})"
        console.print(f"  {printable(text)}", markup=False)
    errors = sum(finding.severity == "error" for finding in diagnosis.findings)
    warnings = len(diagnosis.findings) - errors
    found = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}" if diagnosis.findings else "nothing found"
    made = f"{diagnosis.checks} checks of {diagnosis.looked_at}" if diagnosis.looked_at else "nothing answers"
    console.print(f"{found}: {made}")


def print_replicas(answer: dict[str, Any]) -> None:
    """Print all replicas of a gateway's answer."""
    answer = all_printable(answer)
    table = _table("replica", "state", "requests", "keys", "comes from", "labels", "address")
    for each in answer["replicas"]:
        figures = each["state"], str(each["active_requests"]), str(each["keys"])
        table.add_row(*map(escape, (each["id"], *figures, *_origin(each))))
    for each in answer["unused"]:
        table.add_row(*map(escape, (each["id"], f"not used: {each['problem']}", "", "", *_origin(each))))
    _console().print(table)


def _origin(replica: dict[str, Any]) -> tuple[str, str, str]:
    labels = " ".join(f"{name}={value}" for name, value in replica["labels"].items())
    source = replica["source"] or ""
    return "kvgate replicas add" if source == "added" else source, labels, replica["url"]
