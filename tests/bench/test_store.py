"""bench.store, run as a user runs it: it writes what it measured."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SHORT = ("--seconds", "1", "--rate", "100", "--keys", "2000", "--calls", "40", "--gateways", "1")


@pytest.mark.slow
def test_it_measures_placements_beside_other_work_and_the_maps_size(tmp_path: Path) -> None:
    out = tmp_path / "store.json"
    command = [sys.executable, "-m", "bench.store", *SHORT, "--gateway-per-s", "1000", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {"processor", "cores", "python", "commit"} == found["machine"].keys()
    assert found["versions"].keys() == {"redis"}
    assert found["command"] == shlex.join(["python", *command[1:]])

    kinds = ("saturation", "latency", "memory")
    rows = {what: [row for row in found["rows"] if row["what"] == what] for what in kinds}
    (saturation,) = rows["saturation"]
    assert saturation["gateways"] == 1
    assert saturation["placements_per_s"] > 0
    assert saturation["gateways_worth"] == saturation["placements_per_s"] / 1000
    assert 0 < saturation["redis_cpu_share"] < 1.5
    assert saturation["redis_waiting_share"] >= 0
    assert saturation["gateway_cpu_share"] > 0

    alone, agents, *values = rows["latency"]
    for row in rows["latency"]:
        assert row["placements"] == 100
        assert 0 < row["p50_us"] <= row["p99_us"] <= row["max_us"]
    assert not [name for name in alone if name.startswith("did")]
    assert agents["did_transitions_per_s"] > 0
    assert [row["did_mb_per_s"] > 0 for row in values] == [True] * 4
    assert [row.get("did_evictions_per_s", 0) > 0 for row in values] == [False, False, True, True]

    claims, residents, large = rows["memory"]
    assert (claims["kind"], residents["kind"], large["kind"]) == ("claim", "resident", "resident")
    for row in rows["memory"]:
        assert row["keys"] == 2000
        assert 100 < row["bytes_per_key"] < 2000  # a key's name, its record and its entry in `held`
        assert row["used_bytes"] > row["bytes_per_key"] * row["keys"]
        assert row["hit_share"] > 0.9, "placements do not know what was written for them"
        assert row["times_script_us"] > 0
        assert 0 < row["times_round_trip_p50_us"] <= row["times_round_trip_p99_us"]

    from bench.report.__main__ import report  # here, because the import takes half a second

    page = report(tmp_path)
    assert "transitions per s" in page
    assert "bytes per key" in page
