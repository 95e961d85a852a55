"""bench.attacks: its rows tell what happened, and a run can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.attacks.row import BACK_WITHIN_MB, HELD_MS, Row

QUICK = ("tiff-tags", "json-messages", "answer-gzip-cut")


def test_each_goal_is_missed_by_what_exceeds_it_and_by_nothing_else() -> None:
    good = Row("a", "b", "200", held_ms=HELD_MS, before_mb=100, peak_mb=900, after_mb=100 + BACK_WITHIN_MB)
    assert good.judged().missed == ()
    for harmed, named in (
        (replace(good, held_ms=HELD_MS + 1), "held up"),
        (replace(good, health_failed=1), "/health failed"),
        (replace(good, after_mb=good.after_mb + 1), "kept"),
        (replace(good, honest_refused={"429": 1}), "honest client refused"),
        (replace(good, is_alive=False), "died"),
        (replace(good, missed=("of its own",)), "of its own"),
    ):
        (missed,) = harmed.judged().missed
        assert named in missed


@pytest.mark.slow
def test_it_attacks_a_gateway_and_its_rows_have_all_figures(tmp_path: Path) -> None:
    out = tmp_path / "attacks.json"
    command = [sys.executable, "-m", "bench.attacks", "--only", ",".join(QUICK), "--idle-s", "0.5"]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, check=False, timeout=250)
    rows = json.loads(out.read_text())["rows"]
    assert [row["attack"] for row in rows] == list(QUICK), done.stderr
    assert done.returncode == (1 if any(row["missed"] for row in rows) else 0)
    for row in rows:
        assert not row["got"].startswith(("the attack failed", "could not be measured")), row
        assert row["honest_answered"] > 0
        assert min(row["seconds"], row["idle_ms"], row["health_ms"], row["honest_ms"], row["after_mb"]) > 0
        assert row["peak_mb"] >= row["before_mb"] > 20
    assert "lines in the gateway's log" in rows[0]["got"]
