"""bench.report: the content of a results page, also when results are missing."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from bench.report import growth
from bench.report.__main__ import main, report

MACHINE = {"processor": "Some CPU", "cores": "2", "python": "3.11.7", "commit": "abc1234"}
NOTHING = "\N{EN DASH}"
VOID = ("meta", "br", "path", "use", "rect")


@dataclass
class Page(HTMLParser):
    """The page as a browser parses it: its elements, and the text of each table row."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    best: list[str] = field(default_factory=list)
    words: str = ""
    is_open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.is_open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.is_open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data
        if "tr" in self.is_open:
            self.rows[-1][-1] += data
        if "strong" in self.is_open and "td" in self.is_open:
            self.best.append(data)

    def row(self, *beginning: str) -> list[str]:
        (found,) = [row for row in self.rows if tuple(row[: len(beginning)]) == beginning]
        return found

    def attributes(self, *names: str) -> list[str]:
        return [value or "" for _, found in self.tags for name, value in found.items() if name in names]


def overhead_row(contender: str, cpu_us: float, p50_ms: float, **others: Any) -> dict[str, Any]:
    shape = {"prompt": "350 B", "answer": "plain", "connections": 8, "rate_per_s": 0.0}
    counts = {"requests": 1000, "failed": 0, "per_s": 1e6 / max(1, cpu_us), "idle": 0.2, "rss_mb": 80}
    times = {"first_byte_p50_ms": p50_ms, "first_byte_p99_ms": p50_ms * 2, "total_p50_ms": 1, "total_p99_ms": 2}
    return {"contender": contender, "cpu_us": cpu_us, "store_cpu_us": 0.0, **shape, **counts, **times, **others}


def routing_row(system: str, seed: int, times_ms: list[float], **others: Any) -> dict[str, Any]:
    who = {"engine": "simulated", "mix": "images", "system": system, "instances": 1, "seed": seed}
    counts = {
        "requests": len(times_ms),
        "failed": 0,
        "per_s": 3.1,
        "split": [0.4, 0.6],
        "wrong_share": None,
        "peak_load": None,
    }
    return {**who, **counts, "ttft_ms": times_ms, "cache_share": 0.5, "idle": 0.4, "valid": True, **others}


def offload_row(tier: str, chunk_tokens: int | None, seed: int, times_ms: list[float], **others: Any) -> dict[str, Any]:
    what = {"engine": "simulated", "scenario": "revisits", "tier": tier, "chunk_tokens": chunk_tokens, "seed": seed}
    counts = {"requests": len(times_ms), "failed": 0, "per_s": 2.1, "prompt_tokens_per_s": 9000.0, "fetched_bytes": 0}
    shares = {"gpu_share": 0.4, "loaded_share": 0.0, "cpu_bytes": 11_100_000_000, "redis_bytes": 0}
    return {**what, **counts, **shares, "ttft_ms": times_ms, "idle": 0.4, "valid": True, **others}


OVERHEAD = [
    overhead_row("direct", 0, 0.1),
    overhead_row("kvgate", 217, 2.1, store_cpu_us=115),
    overhead_row("sglang-router", 119, 0.8),
    overhead_row("gives up", 7, 0.2, failed=900),
]
PLACE = [
    {"replicas": 8, "keys": keys, "case": case, "script_us": us, "round_trip_p50_us": 300, "round_trip_p99_us": 900}
    for case, keys, us in (("known", 10, 60), ("known", 40, 111), ("new", 10, 150), ("new", 40, 403))
]
ROUTING = [
    *(routing_row("prefix_kv_aware", seed, [10.0 * seed, 50, 90], cache_share=0.9) for seed in (1, 2, 3)),
    routing_row("prefix_kv_aware", 1, [20, 60, 80], cache_share=0.88, instances=2),
    routing_row("round_robin", 1, [200, 400, 900]),
    routing_row("round_robin", 2, [1, 1, 1], cache_share=0.99, idle=0.12, valid=False),
    routing_row("<b>$x$ & \\1", 1, [300, 500, 1000], mix="<i>chat</i>"),
    routing_row("oracle", 1, [5, 6, 7], cache_share=0.95, instances=0),
]
OFFLOAD = [
    offload_row("gpu", None, 11, [1000, 1400, 2600]),
    *(offload_row("cpu", 256, seed, [100.0 + seed, 200, 300], loaded_share=0.6) for seed in (11, 12, 13)),
    offload_row("redis", 256, 11, [1, 1, 1], idle=0.05, valid=False),
]
GROWTH = [
    {
        "gateways": gateways,
        "workers": workers,
        "gateways_us": 700 + gateways,
        "redis_us": 200 + workers / 10,
        "resting_gateway_core": 0.01,
        "resting_redis_core": 0.02,
        "redis_in_bytes": 4100,
        "redis_out_bytes": 900,
    }
    for gateways in (1, 50)
    for workers in (8, 1000)
]
STORE = [
    {"what": "latency", "beside": "place & <settle>", "p99_us": 812.25, "is_ok": True},
    {"what": "sync", "calls_per_s": 4120},
]


def write(folder: Path, **files: list[dict[str, Any]]) -> None:
    for name, rows in files.items():
        command = f"python -m bench.{name} --as-it-was"
        facts = {"machine": MACHINE, "versions": {"kvgate": "0.1.0"}, "command": command, "rows": rows}
        (folder / f"{name}.json").write_text(json.dumps(facts))


def parsed(folder: Path) -> Page:
    page = Page()
    page.feed(report(folder))
    page.close()
    assert page.is_open == []
    return page


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("full")
    write(
        folder,
        overhead=OVERHEAD,
        place=PLACE,
        routing=ROUTING,
        store=STORE,
        offload=OFFLOAD,
        **{"fleet-grid": GROWTH},
        **{"routing-mixes": [], "routing-real": [], "offload-images": [], "offload-real": [], "overhead-latency": []},
    )
    return parsed(folder)


def test_every_file_becomes_a_section_that_says_how_to_reproduce_it(full: Page) -> None:
    sections = [attributes.get("id") for tag, attributes in full.tags if tag == "section"]
    routed = ["routing", "routing-mixes", "routing-real"]
    files = [*routed, "offload-images", "offload", "offload-real", "overhead", "overhead-latency", "place"]
    assert sections == ["facts", *files, "fleet-grid", "store"]
    for name in ("routing", "offload", "overhead", "place", "store"):
        assert f"Reproduce it with python -m bench.{name} --as-it-was" in full.words
    facts = "processor Some CPU, cores 2, python 3.11.7"
    assert full.row("routing.json") == ["routing.json", "abc1234", facts, "kvgate 0.1.0"]
    assert "Missing" not in full.words


def test_the_page_fetches_nothing_and_its_ids_are_its_own(full: Page) -> None:
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in full.tags}
    assert all(link.startswith("#") for link in full.attributes("src", "href", "xlink:href"))
    assert "@import" not in full.words
    assert "url(http" not in str(full.tags) + full.words
    ids = full.attributes("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in full.attributes("href", "xlink:href")} <= set(ids)


def test_a_plot_tells_those_who_do_not_see_it_what_it_shows(full: Page) -> None:
    plots = [attributes for tag, attributes in full.tags if tag == "svg"]
    assert all(plot["role"] == "img" for plot in plots)
    told = " ".join(plot["aria-label"] or "" for plot in plots)
    assert "sglang-router 119, kvgate 332" in told
    assert "KVGate 90%, KVGate x2 88%, KVGate, round_robin 50%, oracle 95%" in told
    assert "8 replicas, known: 10 keys 60, 40 keys 111" in told
    assert (
        "Redis, ms for a request, by replicas. 1 gateway: 8: 0.20, 1000: 0.30; 50 gateways: 8: 0.20, 1000: 0.30."
        in told
    )


def test_an_invalid_run_is_marked_and_counts_nowhere(full: Page) -> None:
    reason = full.row("KVGate, round_robin", "1", "seed 2")[-1]
    assert reason == "invalid: only 12 % idle CPU in scaled time, under 20 %"
    assert [attributes.get("class") for tag, attributes in full.tags if tag == "tr"].count("invalid") == 2
    assert full.row("KVGate, round_robin", "1", "1")[3:6] == ["400", "900", "900"]
    assert "99.0" not in "".join(full.best)


def test_tiers_stand_above_what_was_published_of_them_which_competes_with_nobody(full: Page) -> None:
    assert full.row("CPU memory, 256", "3")[2:5] == ["200", "300", "204"]
    assert full.row("CPU memory, 256", "3")[8:10] == ["60.0\N{NARROW NO-BREAK SPACE}%", "11.10"]
    assert full.row("KVGate: CPU memory, 256")[2:6] == ["249", "412", NOTHING, "2.33"]
    assert full.row("Redis, direct, 256", "seed 11")[-1] == "invalid: only 5 % idle CPU in scaled time, under 20 %"
    assert "2.33" not in full.best


def test_medians_are_over_seeds_and_percentiles_as_the_client_takes_them(full: Page) -> None:
    row = full.row("KVGate", "1", "3")
    assert row[3:6] == ["50.0", "90.0", "90.0"]
    assert row[8] == "60 / 40"


def test_the_best_is_emphasised_whoever_has_it_unless_it_does_not_compete(full: Page) -> None:
    assert {"119", "0.70"} <= set(full.best)  # sglang-router's CPU and added latency
    assert not {"217", "332", "7.0", "0.10"} & set(full.best)  # kvgate's are higher; "gives up" fails most requests
    assert "60.0" not in full.best
    assert {"50.0", "80.0"} <= set(full.best)
    assert "6.0" not in full.best  # the oracle's value


def test_goals_of_a_placement_are_met_or_missed(full: Page) -> None:
    assert full.row("40", "known")[3] == "met: 1.00"


def test_names_are_text_wherever_they_appear(full: Page) -> None:
    assert full.row("<b>$x$ & \\1")
    assert full.row("place & <settle>") == ["place & <settle>", "812.2", "yes"]
    assert "<i>chat</i>, simulated" in full.words
    assert not {"b", "i"} & {tag for tag, _ in full.tags}


def test_what_is_missing_is_said_with_the_command_that_makes_it(tmp_path: Path) -> None:
    write(tmp_path, place=PLACE)
    page = parsed(tmp_path)
    makefile = (Path(__file__).parents[2] / "Makefile").read_text().replace("\\\n", " ")
    routed, kept_outside = ("routing", "routing-mixes", "routing-real"), ("offload", "offload-real")
    for name in (*routed, *kept_outside, "overhead", "overhead-latency", "store"):
        made_by = f"make bench-{name}"
        assert re.search(rf"^MEASURED := .*\bbench-{name}(\s|$)", makefile, re.MULTILINE)
        assert f"Missing: {name}.json, made by {made_by}." in page.words
        assert f"Make it with {made_by}" in page.words
    assert "Missing: place.json" not in page.words


def test_rows_without_a_single_answer_or_none_at_all_still_make_a_page(tmp_path: Path) -> None:
    write(tmp_path, overhead=[], place=[], store=[], routing=[routing_row("random", 1, [], failed=9)])
    page = parsed(tmp_path)
    assert page.words.count("Its file has no rows.") == 3
    assert page.row("KVGate, random")[3:6] == [NOTHING] * 3


def test_what_was_left_out_is_told_with_the_reason(tmp_path: Path) -> None:
    facts = {"machine": MACHINE, "rows": [], "left_out": ["images, seed 1, <vllm-router>: it ended with 1"]}
    (tmp_path / "routing.json").write_text(json.dumps(facts))
    assert "Left out: images, seed 1, <vllm-router>: it ended with 1" in parsed(tmp_path).words


def test_a_file_that_is_something_else_is_named_and_so_is_what_is_wrong(tmp_path: Path) -> None:
    write(tmp_path, overhead=[{"contender": "kvgate"}])
    with pytest.raises(SystemExit, match=r"overhead\.json is not what make bench-overhead writes: 0 / prompt: "):
        report(tmp_path)


def test_results_in_the_repository_make_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the drawings, which take most of the time and are the same as those of the other pages."""
    monkeypatch.setattr(Figure, "savefig", lambda _figure, file, **_options: file.write("<svg ></svg>"))
    results = Path(__file__).parents[2] / "bench" / "results"
    out = tmp_path / "made" / "report.html"
    monkeypatch.setattr(sys, "argv", ["bench.report", "--results", str(results), "--out", str(out)])
    main()
    assert "CPU per request against the peers" in out.read_text()


def test_the_plot_of_growth_is_a_file_for_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, **{"fleet-grid": GROWTH})
    results, drawn = str(tmp_path / "fleet-grid.json"), tmp_path / "growth.svg"
    monkeypatch.setattr(sys, "argv", ["growth", "--results", results, "--out", str(drawn)])
    growth.main()
    assert "50 gateways" in drawn.read_text()
