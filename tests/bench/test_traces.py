"""bench.traces: what it tells, and that it runs as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.traces import HUNDREDTH, LOADS, OFF, Row, ratio


def test_a_ratio_is_the_mean_over_starts_with_its_standard_error() -> None:
    starts = ({OFF: 100, HUNDREDTH: 101}, {OFF: 200, HUNDREDTH: 206})
    rows = [
        Row("plain", start, load.name, 1000, cpu_us)
        for start, of_load in enumerate(starts)
        for load, cpu_us in of_load.items()
    ]
    assert str(ratio(rows, HUNDREDTH, OFF)) == "1.020 ± 0.010"
    assert str(ratio(rows[:2], HUNDREDTH, OFF)) == "1.010 ± 0.000"


@pytest.mark.slow
def test_it_measures_all_loads_in_each_start(tmp_path: Path) -> None:
    out = tmp_path / "traces.json"
    options = ("--starts", "1", "--rounds", "1", "--seconds", "0.5", "--answers", "stream 16")
    command = [sys.executable, "-m", "bench.traces", *options, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "beside" in done.stdout
    rows = json.loads(out.read_text())["rows"]
    assert [row["load"] for row in rows] == [load.name for load in LOADS]
    assert all(row["requests"] > 0 and row["cpu_us"] > 0 for row in rows)
