"""bench.chores, run as a user runs it: it writes what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_it_measures_how_fast_keys_are_removed_and_at_what_cost(tmp_path: Path) -> None:
    out = tmp_path / "chores.json"
    command = [sys.executable, "-m", "bench.chores", "--replicas", "3", "--keys", "300", "--seconds", "5"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(out.read_text())["rows"]}
    assert {case: row["removed"] for case, row in rows.items()} == {
        "quiet": 0,
        "repair": 0,
        "trim": 450,
        "sweep": 900,
        "restart": 900,
    }
    for case, row in rows.items():
        assert row["untouched"] == (0 if row["removed"] else 3), case
        assert 0 < row["redis_share"] < 1
        assert 0 < row["probe_p99_ms"] <= row["probe_max_ms"]
