"""Small events and chains for tests: blocks of four tokens, and text with five bytes per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.agent.chains import Binding
from coordinator.agent.kv_events import Removed, Stored
from coordinator.agent.residency import Evicted, Residency, Resident, Transition

SIZE = 4
IMAGE = 99
"""The placeholder token of images."""
BYTES_PER_TOKEN = 5


def stored(hashes: list[int], parent: int | None = None, session: str | None = None, **fields: Any) -> Stored:
    usual = {
        "tokens": [0] * (SIZE * len(hashes)),
        "block_size": SIZE,
        "medium": "gpu",
        "extra": None,
        "group": 0,
        "is_prefix": True,
    }
    return Stored(hashes=hashes, parent=parent, session=session, **{**usual, **fields})


def told(hashes: list[int], parent: int | None = None, session: str | None = "tip", **fields: Any) -> Stored:
    """Blocks that name a session. By default it is the session of `chain`."""
    return stored(hashes, parent, session, **fields)


def removed(*hashes: int, medium: str = "gpu", group: int | None = 0) -> Removed:
    return Removed(list(hashes), medium, group)


def chain(*ends: int, tip: str = "tip", estimate: int | None = None, is_report: bool = False) -> Binding:
    """Keys k4, k8, … and the tip; each ends after that number of text tokens."""
    return Binding(
        tip=tip,
        keys=[*(f"k{end}" for end in ends[:-1]), tip],
        text_bytes=[end * BYTES_PER_TOKEN for end in ends],
        image_counts=[0] * len(ends),
        prompt_tokens=ends[-1] if estimate is None else estimate,
        is_report=is_report,
    )


def bound(*bindings: Binding) -> Residency:
    made = Residency()
    made.table.block_size = SIZE
    for binding in bindings:
        assert made.bind(binding) == []
    return made


def brief(transitions: Sequence[Transition]) -> list[str]:
    """Transitions as text: "+key@last block", "-key" or "reset"."""
    return [
        f"+{each.key}@{each.block_hash}"
        if isinstance(each, Resident)
        else f"-{each.key}"
        if isinstance(each, Evicted)
        else "reset"
        for each in transitions
    ]


def held(residency: Residency) -> dict[str, int]:
    """The last block of each resident key."""
    return {resident.key: resident.block_hash for resident in residency.residents()}
