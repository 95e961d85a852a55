"""What `kvgate top` draws of recent requests."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from gateway.ops.cli.top_view import Tally, view

SEEN: dict[str, Any] = {
    "replicas": [
        {"id": "r0", "pool": "m", "state": "ready", "active_requests": 1, "keys": 7},
        {"id": "r1", "pool": "m", "state": "draining", "active_requests": 3, "keys": 9},
    ],
    "pools": [
        {
            "pool": "m",
            "waiting_requests": 2,
            "held_requests": 0,
            "waiting": [{"band": "batch", "tenant": "night[red]", "requests": 2, "oldest_s": 1.5}],
            "replicas": [
                {"replica": "r0", "slots": 4, "backlog_s": 0.2, "has_room": True},
                {"replica": "r1", "slots": 4, "backlog_s": 0, "has_room": False},
            ],
        }
    ],
}


def record(**fields: Any) -> dict[str, Any]:
    return {"time": "2026-01-02T03:04:05.678+00:00", "gateway": "gw0", "replica": "r0", "status": 200} | fields


def drawn(tally: Tally, sort: str = "name", now_s: float = 100.0, width: int = 200, seen: Any = SEEN) -> list[str]:
    console = Console(width=width, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(view(seen, tally, sort, now_s))
    return captured.get().splitlines()


def test_it_shows_load_room_and_what_became_of_recent_requests() -> None:
    tally = Tally(90.0)
    tally.take("", record(cached_tokens=90, prompt_tokens=100, first_byte_ms=12.0), 99.0)
    tally.take("", record(cached_tokens=0, prompt_tokens=100, first_byte_ms=30.0, status=503), 99.5)
    tally.take("", record(replica=None), 20.0)  # long ago
    lines = drawn(tally)
    assert lines[1].split() == ["r0", "m", "ready", "1", "of", "4", "0.2", "s", "yes", "7", "0.2", "1", "45%", "30"]
    assert lines[2].split()[:11] == ["r1", "m", "draining", "3", "of", "4", "0.0", "s", "no", "9", "0.0"]
    assert "m: 2 waiting (batch night[red] 2 for 1.5 s)" in lines
    decisions = lines[lines.index("last decisions") + 1 :]
    assert [line.split()[:4] for line in decisions] == [
        ["03:04:05.678", "-", "gw0", "503"],
        ["03:04:05.678", "-", "gw0", "200"],
    ]


def test_a_terminal_of_100_columns_wraps_and_cuts_nothing() -> None:
    tally, name = Tally(90.0), "models-chat-1-0a1b2c3d"
    tokens = {"cached_tokens": 90, "matched_tokens": 80, "prompt_tokens": 100, "duration_ms": 300.0}
    tally.take("", record(request_id="0a1b2c3d" * 4, path="/v1/chat/completions", model=name, **tokens), 99.0)
    seen = {"pools": [], "replicas": [{**SEEN["replicas"][0], "pool": name}]}
    text = "\n".join(drawn(tally, width=100, seen=seen))
    assert "…" not in text
    assert all(word in text for word in ("requests/s", "cached", "90/80/100", "end 300 ms"))
    _, heading, *rows = text.splitlines()
    pool = slice(heading.index("pool"), heading.index("state"))
    assert "".join(row[pool].strip() for row in rows[:3]) == name


def test_what_somebody_else_wrote_breaks_nothing() -> None:
    tally = Tally(90.0)
    for garbage in (
        {},
        record(status="x", cached_tokens=[], prompt_tokens={}, first_byte_ms="\x1b[2J"),
        {"gateway": "\x1b[31m"},
    ):
        tally.take("", garbage, 99.0)
    tally.take("dropped", 5, 99.0)
    tally.take("trouble", "the store is away", 99.0)
    lines = drawn(tally)
    assert {"5 decisions were not shown", "the store is away"} < set(lines)
    assert "\x1b" not in "".join(lines)
