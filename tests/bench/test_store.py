"""bench.store, run as a user runs it: what it writes is what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SHORT = ("--seconds", "0.5", "--rate", "100", "--keys", "2000", "--calls", "40", "--gateways", "1")


def test_it_measures_placements_beside_other_work_and_the_maps_size(tmp_path: Path) -> None:
    out = tmp_path / "store.json"
    command = [sys.executable, "-P", "-m", "bench.store", *SHORT, "--gateway-per-s", "1000", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {"processor", "cores", "python", "commit", "redis"} <= found["machine"].keys()

    saturation = found["saturation"]
    assert saturation["gateways"] == 1
    assert saturation["placements_per_s"] > 0
    assert saturation["gateways_worth"] == saturation["placements_per_s"] / 1000
    assert 0 < saturation["redis"]["cpu_share"] < 1.5
    assert saturation["redis"]["waiting_share"] >= 0
    assert saturation["gateway_cpu_share"] > 0

    alone, agents, *values = found["latency"]
    for row in found["latency"]:
        assert row["placements"] == 50
        assert 0 < row["p50_us"] <= row["p99_us"] <= row["max_us"]
    assert alone["did"] == {}
    assert agents["did"]["transitions_per_s"] > 0
    assert [row["did"]["mb_per_s"] > 0 for row in values] == [True, True]

    claims, residents, large = found["memory"]
    assert (claims["kind"], residents["kind"], large["kind"]) == ("claim", "resident", "resident")
    for row in found["memory"]:
        assert row["keys"] == 2000
        assert 100 < row["bytes_per_key"] < 2000  # a key's name, its record, its place in `held`
        assert row["used_bytes"] > row["bytes_per_key"] * row["keys"]
        assert row["hit_share"] > 0.9, "placements do not know what was written for them"
        assert row["times"]["script_us"] > 0
        assert 0 < row["times"]["round_trip_p50_us"] <= row["times"]["round_trip_p99_us"]
