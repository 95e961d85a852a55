"""bench.faults: the stored results of a run, its exit status and its page."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench import record
from bench.faults import __main__ as command
from bench.faults import results
from bench.faults.page import PAGE, page, write
from bench.faults.row import Row, Section

ROOT = Path(__file__).parents[3]
GOOD = Row("redis-scripts", 2, "c0de", "abc", requests=100, right_after_s=1.9, goal_s=2.0)
GOOD_WAITING = replace(
    GOOD, waits=True, waiting=12, waited=90, placed=100, longest_wait_s=2.34, cap=4, most_active=4, most_running=4
)
Run = Callable[..., int]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the faults that were measured. Each fault except `agent-killed` meets its goals."""
    names: list[str] = []

    def measure(name: str, section: Section, code: str) -> Row:
        names.append(name)
        savable = 1 if name == "agent-killed" else 0
        good = GOOD_WAITING if section.waits else GOOD
        of_section = replace(good, gateways=section.gateways, replicas=section.replicas)
        return replace(of_section, fault=name, code=code, failed=savable, savable=savable).judged()

    monkeypatch.setattr(command, "measured", measure)
    monkeypatch.setattr(record, "begin", lambda: None)
    return names


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: list[str]) -> Run:
    """Runs the command and gives its exit status."""

    def run(*options: str) -> int:
        measured.clear()
        files = ["--out", str(tmp_path / "faults.json"), "--page", str(tmp_path / "faults.md")]
        monkeypatch.setattr(sys, "argv", ["bench.faults", *options, *files])
        with pytest.raises(SystemExit) as ended:
            command.main()
        return int(ended.value.code or 0)

    return run


def test_a_goal_that_was_missed_is_the_exit_status_in_the_run_that_found_it_and_in_the_next(
    run: Run, measured: list[str]
) -> None:
    assert run("--only", "redis-scripts") == 0
    assert run("--only", "redis-scripts,agent-killed") == 1
    assert measured == ["agent-killed"]
    assert run("--only", "redis-scripts,agent-killed") == 1
    assert measured == []
    assert run("--only", "redis-scripts") == 0


def test_a_run_goes_on_where_the_last_one_ended_unless_told_otherwise_or_the_code_has_changed(
    run: Run, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("--only", "redis-scripts")
    run("--gateways", "8", "--only", "redis-scripts")
    assert measured == ["redis-scripts"], "with as many gateways it was not measured"
    run("--replicas", "64", "--only", "redis-scripts")
    assert measured == ["redis-scripts"], "with as many replicas it was not measured"
    run("--waiting", "--only", "redis-scripts")
    assert measured == ["redis-scripts"], "it was not measured with waiting requests"
    run("--only", "redis-scripts,redis-killed")
    assert measured == ["redis-killed"]
    run("--only", "redis-scripts,redis-killed", "--again")
    assert measured == ["redis-scripts", "redis-killed"]
    monkeypatch.setattr(results, "code", lambda: "another")
    run("--only", "redis-killed")
    assert measured == ["redis-killed"]


def test_a_fault_that_could_not_be_measured_is_measured_again_and_is_no_success(
    run: Run, measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = command.measured
    monkeypatch.setattr(command, "measured", lambda *about: replace(whole(*about), skipped="no Redis here"))
    assert run("--only", "redis-killed") == 1
    assert "no Redis here" in (tmp_path / "faults.md").read_text()
    monkeypatch.setattr(command, "measured", whole)
    assert run("--only", "redis-killed") == 0
    rows = json.loads((tmp_path / "faults.json").read_text())["rows"]
    assert [(row["fault"], row["skipped"]) for row in rows] == [("redis-killed", "")]


def test_each_goal_is_missed_by_what_exceeds_it_and_by_nothing_else() -> None:
    assert GOOD.judged().missed == ()
    assert replace(GOOD, failed=3, late_excused=5).judged().missed == ()
    assert replace(GOOD, right_after_s=None, goal_s=None).judged().missed == ()
    for harmed, named in (
        (replace(GOOD, savable=1), "1 failed that could have been saved"),
        (replace(GOOD, late=2, latest_s=7.2), "2 answers late, by 7 s at worst"),
        (replace(GOOD, right_after_s=2.1, last_wrong="no store"), "right after 2.1 s, of 2: no store"),
        (replace(GOOD, right_after_s=None, last_wrong="no store"), "not right again: no store"),
        (replace(GOOD, load_left="left: 1"), "load: left: 1"),
        (replace(GOOD, predicted=24, wrong=("r0 had 0",)), "1 of 24 predictions wrong: r0 had 0"),
    ):
        assert harmed.judged().missed == (named,)


def test_goals_of_the_queue_are_judged_where_requests_wait() -> None:
    assert GOOD_WAITING.judged().missed == ()
    assert replace(GOOD, seats_left="left of the queue: fair", over_cap_until_s=1.0).judged().missed == ()
    over = replace(GOOD_WAITING, most_active=6, over_cap_until_s=1.0)
    assert replace(over, over_cap_goal_s=5.0).judged().missed == (), "the fault explains it"
    told = "6 requests at a replica that takes 4, the last {} s after the fault's end"
    for harmed, named in (
        (replace(GOOD_WAITING, waiting=4), "too few waited: 4 at the strike, 90 of 100 in all"),
        (replace(GOOD_WAITING, waited=49), "too few waited: 12 at the strike, 49 of 100 in all"),
        (over, told.format("1.0")),
        (replace(over, over_cap_until_s=-3.0), told.format("-3.0")),
        (replace(over, over_cap_until_s=5.1, over_cap_goal_s=5.0), told.format("5.1")),
        (replace(GOOD_WAITING, seats_left="left of the queue: fair"), "left of the queue: fair"),
    ):
        assert harmed.judged().missed == (named,)


def test_the_page_says_how_many_broken_streams_went_on() -> None:
    """Of rows that were measured before they were counted, it says nothing."""
    counted = replace(GOOD, streams_broken=30, streams_went_on=29)
    told = "59 of 60 streams that a replica broke off went on at another one."
    assert told in page(
        [counted, replace(counted, streams_went_on=30), GOOD], {"cores": "2", "processor": "", "python": ""}
    )
    assert "broke off went on" not in page([GOOD], {"cores": "2", "processor": "", "python": ""})


def test_the_published_page_is_made_of_the_published_results(tmp_path: Path) -> None:
    """`python -m bench.faults.page` writes the page again."""
    write(ROOT / results.FILE, tmp_path / "faults.md")
    assert (tmp_path / "faults.md").read_text() == (ROOT / PAGE).read_text()


@pytest.mark.slow
def test_a_fault_strikes_real_processes_and_its_row_has_all_figures(tmp_path: Path) -> None:
    out, document = tmp_path / "faults.json", tmp_path / "faults.md"
    options = ["--only", "redis-scripts", "--out", str(out), "--page", str(document)]
    command = [sys.executable, "-m", "bench.faults", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["skipped"] == "", done.stdout + done.stderr
    assert done.returncode == (1 if row["missed"] else 0)
    assert row["requests"] > 100
    assert row["failed"] == 0
    assert row["states"]["exact"] > 0.8 * row["requests"]
    assert row["right_after_s"] is not None
    assert row["load_left"] == ""
    assert row["predicted"] == 24
    assert "Redis forgets all scripts" in document.read_text()
