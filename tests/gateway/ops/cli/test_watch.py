"""The lines of `kvgate watch`."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.ops.cli.watch import line_of


@pytest.mark.parametrize(
    ("fields", "placed"),
    [
        ({"resumed": []}, "→ r0 hit  "),
        ({"hedged": "r1", "resumed": []}, "→ r0 hit hedged=r1  "),
        ({"resumed": [{"replica": "r1", "why": "reset", "how": "exact"}]}, "→ r0 hit resumed=r1  "),
        ({"resumed": [{"replica": "r0", "why": "reset", "how": "none", "why_not": "x"}]}, "→ r0 hit broken=r0  "),
        ({}, "→ r0 hit  "),
    ],
    ids=["well", "late", "went on", "did not go on", "of an older gateway"],
)
def test_a_line_says_which_replicas_were_late_or_broke_the_answer_off(fields: dict[str, Any], placed: str) -> None:
    assert f"  {placed}" in line_of({"replica": "r0", "why": "hit", **fields})
