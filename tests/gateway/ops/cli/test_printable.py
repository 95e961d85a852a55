"""Whatever others wrote, a terminal shows it and obeys none of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.ops.cli import tables
from gateway.ops.cli.printable import all_printable, printable, printable_lines
from gateway.ops.local.cluster_status import MemberStatus

EVIL = "x\x1b]0;PWNED\x07\x9b2J\u202e"
SHOWN = "x?]0;PWNED??2J?"
CHOICE = {"replica": EVIL, "why": "cold"}
EXPLAINED = {"pool": EVIL, "model": EVIL, "chain": [], "replicas": [], "choice": CHOICE}
LINE = {"band": EVIL, "tenant": EVIL, "requests": 1, "oldest_s": 1.0, "why": EVIL, "pinned": EVIL, "tried": [EVIL]}
ROOM = {"replica": EVIL, "state": EVIL, "active_requests": 0, "slots": 8, "backlog_s": 0.0, "max_wait_s": 10}
QUEUE = {
    "pool": EVIL,
    "waiting_requests": 1,
    "held_requests": 0,
    "waiting": [LINE],
    "replicas": [{**ROOM, "has_room": True}],
}


@pytest.mark.parametrize(
    "show",
    [
        lambda: tables.print_owners(EXPLAINED),
        lambda: tables.print_queue(QUEUE),
        lambda: tables.print_status([MemberStatus("replica", EVIL, EVIL, None, "ready", EVIL)]),
    ],
    ids=["owners", "queue", "status"],
)
def test_no_command_prints_an_escape_of_somebody_elses(
    show: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    show()
    printed = capsys.readouterr().out
    assert SHOWN in printed
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(printed)


def test_lines_stay_where_they_are_meant() -> None:
    assert printable("a\nb") == "a?b"
    assert printable_lines("a\nb\x1b") == "a\nb?"
    assert all_printable({"a\n": ["\r", 1, None, {"b": "größer"}]}) == {"a?": ["?", 1, None, {"b": "größer"}]}
