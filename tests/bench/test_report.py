"""bench.report: the content of a results page, also when results are missing."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

MACHINE = {"processor": "Some CPU", "cores": "2", "python": "3.11.7", "commit": "abc1234"}


class Page(HTMLParser):
    """The text of the page, the ids of its sections, and the cells of each table row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.sections: list[str | None] = []
        self.words = ""
        self._is_row = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self.sections.append(dict(attrs).get("id"))
        if tag == "tr":
            self.rows.append([])
            self._is_row = True
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_row = self._is_row and tag != "tr"

    def handle_data(self, data: str) -> None:
        self.words += data
        if self._is_row:
            self.rows[-1][-1] += data

    def row(self, *beginning: str) -> list[str]:
        (found,) = [row for row in self.rows if tuple(row[: len(beginning)]) == beginning]
        return found


def overhead_row(contender: str, cpu_us: float, p50_ms: float, **others: Any) -> dict[str, Any]:
    shape = {"prompt": "350 B", "answer": "plain", "connections": 8, "rate_per_s": 0.0}
    counts = {"requests": 1000, "failed": 0, "per_s": 1e6 / max(1, cpu_us), "idle": 0.2, "rss_mb": 80}
    times = {"first_byte_p50_ms": p50_ms, "first_byte_p99_ms": p50_ms * 2, "total_p50_ms": 1, "total_p99_ms": 2}
    return {"contender": contender, "cpu_us": cpu_us, "store_cpu_us": 0.0, **shape, **counts, **times, **others}


def routing_row(system: str, seed: int, times_ms: list[float], **others: Any) -> dict[str, Any]:
    who = {"engine": "simulated", "mix": "images", "system": system, "instances": 1, "seed": seed}
    counts: dict[str, Any] = {"requests": len(times_ms), "failed": 0, "per_s": 3.1, "split": [0.4, 0.6]}
    counts |= {"wrong_share": None, "peak_load": None}
    return {**who, **counts, "ttft_ms": times_ms, "cache_share": 0.5, "idle": 0.4, "valid": True, **others}


OVERHEAD = [overhead_row("direct", 0, 0.1), overhead_row("kvgate", 217, 2.1, store_cpu_us=115)]
PLACE = [
    {"replicas": 8, "keys": keys, "case": case, "script_us": us, "round_trip_p50_us": 300, "round_trip_p99_us": 900}
    for case, keys, us in (("known", 10, 60), ("known", 40, 111), ("new", 10, 150), ("new", 40, 403))
]
ROUTING = [
    *(routing_row("prefix_kv_aware", seed, [10.0 * seed, 50, 90], cache_share=0.9) for seed in (1, 2, 3)),
    routing_row("round_robin", 1, [200, 400, 900]),
    routing_row("round_robin", 2, [1, 1, 1], cache_share=0.99, idle=0.12, valid=False),
]


def write(folder: Path, **files: list[dict[str, Any]]) -> None:
    for name, rows in files.items():
        command = f"python -m bench.{name} --as-it-was"
        facts = {"machine": MACHINE, "versions": {"kvgate": "0.1.0"}, "command": command, "rows": rows}
        (folder / f"{name}.json").write_text(json.dumps(facts))


def parsed(folder: Path) -> Page:
    from bench.report.__main__ import report  # here, because the import takes half a second

    page = Page()
    page.feed(report(folder))
    page.close()
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("full")
    write(folder, overhead=OVERHEAD, place=PLACE, routing=ROUTING)
    return parsed(folder)


def test_every_file_becomes_a_section_that_says_how_to_reproduce_it(page: Page) -> None:
    assert {"facts", "routing", "overhead", "place"} < set(page.sections)
    for name in ("routing", "overhead", "place"):
        assert f"Reproduce it with python -m bench.{name} --as-it-was" in page.words
    facts = "processor Some CPU, cores 2, python 3.11.7"
    assert page.row("routing.json") == ["routing.json", "abc1234", facts, "kvgate 0.1.0"]


def test_an_invalid_run_is_marked_and_counts_nowhere(page: Page) -> None:
    reason = page.row("KVGate, round_robin", "1", "seed 2")[-1]
    assert reason == "invalid: only 12 % idle CPU in scaled time, under 20 %"
    assert page.row("KVGate, round_robin", "1", "1")[3:6] == ["400", "900", "900"]
    assert "99.0" not in " ".join(page.row("KVGate, round_robin", "1", "1"))


def test_medians_are_over_seeds_and_percentiles_as_the_client_takes_them(page: Page) -> None:
    row = page.row("KVGate", "1", "3")
    assert row[3:6] == ["50.0", "90.0", "90.0"]
    assert row[8] == "60 / 40"


def test_goals_of_a_placement_are_met_or_missed(page: Page) -> None:
    assert page.row("40", "known")[3] == "met: 1.00"


def test_what_is_missing_is_said_with_the_command_that_makes_it(tmp_path: Path) -> None:
    write(tmp_path, place=PLACE)
    page = parsed(tmp_path)
    makefile = (Path(__file__).parents[2] / "Makefile").read_text().replace("\\\n", " ")
    for name in ("routing", "routing-mixes", "routing-real", "overhead", "overhead-latency", "store"):
        made_by = f"make bench-{name}"
        assert re.search(rf"^MEASURED := .*\bbench-{name}(\s|$)", makefile, re.MULTILINE)
        assert f"Missing: {name}.json, made by {made_by}." in page.words
        assert f"Make it with {made_by}" in page.words
    assert "Missing: place.json" not in page.words


def test_what_was_left_out_is_told_with_the_reason(tmp_path: Path) -> None:
    facts = {"machine": MACHINE, "rows": [], "left_out": ["images, seed 1, <vllm-router>: it ended with 1"]}
    (tmp_path / "routing.json").write_text(json.dumps(facts))
    assert "Left out: images, seed 1, <vllm-router>: it ended with 1" in parsed(tmp_path).words


def test_results_in_the_repository_make_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the drawings, which take most of the time and are the same as those of the other pages."""
    from matplotlib.figure import Figure

    from bench.report.__main__ import main

    monkeypatch.setattr(Figure, "savefig", lambda _figure, file, **_options: file.write("<svg ></svg>"))
    results = Path(__file__).parents[2] / "bench" / "results"
    out = tmp_path / "made" / "report.html"
    monkeypatch.setattr(sys, "argv", ["bench.report", "--results", str(results), "--out", str(out)])
    main()
    assert "CPU per request against the peers" in out.read_text()
