"""bench.budgets: how it counts, and a small run as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.budgets.clients import WORTH, Tenant

OPTIONS = ("--modes", "emptied", "--gateways", "2", "--tenants", "2", "--clients", "2", "--worth", "12,12")
SHORT = ("--kill-each-s", "1.5", "--replicas", "3", "--requests", "10", "--rounds", "2")


def test_a_refusal_is_false_while_more_is_left_than_the_request_can_cost() -> None:
    tenant = Tenant("research", budget=10 * WORTH, served=8 * WORTH)
    for _ in range(2):
        tenant.begins(WORTH)
    tenant.ends(WORTH, 0, "budget_exceeded")
    assert (tenant.false_refusals, tenant.not_explained) == (1, 0), "the other one in flight may take the rest"
    tenant.ends(WORTH, WORTH, "served")
    tenant.begins(WORTH)
    tenant.ends(WORTH, 0, "budget_exceeded")
    assert (tenant.false_refusals, tenant.not_explained) == (2, 1)
    tenant.served += WORTH
    tenant.begins(WORTH)
    tenant.ends(WORTH, 0, "budget_exceeded")
    assert (tenant.false_refusals, tenant.most_in_flight) == (2, 2 * WORTH)


@pytest.mark.slow
def test_it_counts_what_was_served_through_gateways_that_die_and_a_store_that_is_emptied(tmp_path: Path) -> None:
    out = tmp_path / "budgets.json"
    command = [sys.executable, "-m", "bench.budgets", *OPTIONS, *SHORT, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    [mode] = found["modes"]
    assert mode["faults"]["emptied"] == 1
    assert mode["faults"]["killed"] >= 1
    assert mode["outcomes"]["budget_exceeded"] >= 4
    assert mode["beyond_in_flight"] == mode["not_explained"] == 0
    for tenant in mode["tenants"]:
        assert 0 < tenant["served"] <= tenant["charged"] + tenant["unseen"]
        assert tenant["in_flight"] == 0
    rows = {(row["replicas"], row["budgets"]): row for row in found["rows"]}
    assert rows.keys() == {(3, 0), (3, 1), (3, 2)}
    assert all(row["script_us"] > 10 for row in rows.values())
