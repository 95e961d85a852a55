"""bench.traces: what it tells, and that it runs as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.simulated_cpu import Counts
from bench.traces.loads import HUNDREDTH, OFF, ratio
from bench.traces.timed import LOADS


def test_a_ratio_is_the_mean_over_starts_with_its_standard_error() -> None:
    one = {(0, OFF.name): 100.0, (0, HUNDREDTH.name): 101.0}
    other = {(1, OFF.name): 200.0, (1, HUNDREDTH.name): 206.0}
    assert str(ratio(one | other, HUNDREDTH, OFF)) == "1.020 ± 0.010"
    assert str(ratio(one, HUNDREDTH, OFF)) == "1.010"


def test_the_simulated_cpus_counts_are_read_from_its_file() -> None:
    names = "Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw"
    counts = Counts.of_dump(f"version: 1\nevents: {names}\nfn=(1)\n16 3\ntotals: 1000 400 200 30 20 10 3 2\n")
    assert counts == Counts(instructions=1000, l1_misses=60, last_misses=5)
    assert counts.cycles == 1000 + 600 + 500
    with pytest.raises(ValueError, match="no sums"):
        Counts.of_dump("version: 1\n")


@pytest.mark.slow
def test_it_measures_all_loads_in_each_start(tmp_path: Path) -> None:
    out = tmp_path / "traces.json"
    options = ("--starts", "1", "--answers", "stream 16")
    command = [sys.executable, "-m", "bench.traces", *options, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "beside" in done.stdout
    rows = json.loads(out.read_text())["rows"]
    assert [row["load"] for row in rows] == [load.name for load in LOADS]
    assert all(row["requests"] > 0 and row["cpu_us"] > 0 and row["off_cpu_us"] > 0 for row in rows)
