"""bench.overhead, run as a user runs it: it writes what it measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.overhead.placements import percentile_ms
from tests.programs import needs

OPTIONS = ("--prompts", "350 B,1 MB image", "--answers", "plain,stream 16 paced", "--connections", "2")
SHORT = ("--rates", "50", "--seconds", "0.4", "--warm-up-s", "0.1", "--rounds", "1")


@pytest.mark.slow
def test_it_measures_what_it_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    command = [sys.executable, "-m", "bench.overhead", "--contenders", "direct,kvgate x2", *OPTIONS, *SHORT]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    rows = {(row["contender"], row["prompt"], row["answer"], row["rate_per_s"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 2 * 2 * 2 * 2
    for (contender, _, answer, _), row in rows.items():
        assert row["failed"] == 0
        assert row["requests"] > 0
        assert (row["rss_mb"] > 10) == (contender != "direct")
        assert row["total_p50_ms"] >= row["first_byte_p50_ms"] > 0
        if answer == "stream 16 paced":
            assert row["total_p50_ms"] - row["first_byte_p50_ms"] > 16 * 4 * 0.9
    assert {"processor", "cores", "python", "commit"} <= found["machine"].keys()


@pytest.mark.slow
def test_it_shows_the_cost_of_a_part_beside_gateways_without_it(tmp_path: Path) -> None:
    out = tmp_path / "resume.json"
    command = [sys.executable, "-m", "bench.overhead", "--contenders", "kvgate", "--without", "resume", "--calls"]
    cell = ("--prompts", "350 B", "--answers", "stream 16", "--connections", "2", "--seconds", "0.4", "--rounds", "1")
    command += [*cell, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    kvgate, beside = json.loads(out.read_text())["rows"]
    assert (kvgate["contender"], beside["contender"]) == ("kvgate", "kvgate beside")
    assert min(kvgate["calls"], beside["calls"]) > 3  # a request and its answer are read and written
    assert kvgate["calls_ratio"] == pytest.approx(kvgate["calls"] / beside["calls"], abs=0.001)
    assert "calls_ratio" not in beside


@needs("envoy")
@pytest.mark.slow
def test_envoy_and_its_picker_are_one_proxy_whose_parts_are_told(tmp_path: Path) -> None:
    out = tmp_path / "picker.json"
    contenders = "kvgate,envoy,envoy + picker,envoy + picker (answers pass)"
    command = [sys.executable, "-m", "bench.overhead", "--contenders", contenders, "--replicas", "4"]
    command += ["--prompts", "220 KB completion", "--answers", "stream 16", "--connections", "2"]
    command += ["--seconds", "0.4", "--warm-up-s", "0.1", "--rounds", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["versions"]["envoy"])
    kvgate, envoy, reads, passes = found["rows"]
    assert all(row["failed"] == 0 < row["requests"] for row in (kvgate, envoy, reads, passes))
    assert kvgate["picker_cpu_us"] == envoy["picker_cpu_us"] == envoy["store_cpu_us"] == 0 < envoy["cpu_us"]
    assert envoy["placement_p95_ms"] == 0
    for row in (kvgate, reads, passes):
        assert row["store_cpu_us"] > 0
        assert row["placement_p95_ms"] >= row["placement_p50_ms"] > 0
    for row in (reads, passes):
        assert 0 < row["picker_cpu_us"] < row["cpu_us"]


def test_a_percentile_of_placements_counts_those_between_two_looks() -> None:
    before, after = {0.001: 5, 0.002: 5, float("inf"): 5}, {0.001: 5, 0.002: 15, float("inf"): 16}
    assert percentile_ms(before, after, 0.5) == pytest.approx(1.55)
    assert percentile_ms({}, after, 0.1) == pytest.approx(0.32)
    assert percentile_ms(before, after, 1.0) == 2.0  # the last bucket has no bound
    assert percentile_ms(after, after, 0.5) == percentile_ms({}, {}, 0.5) == 0.0
