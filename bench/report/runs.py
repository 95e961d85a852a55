"""The runs of bench.routing, grouped by system and number of instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.routing.measure import Row
from bench.routing.systems import OURS, label

REFERENCES = ("oracle", "pinned")
"""They know more than any router can, and do not compete. The oracle is in older results only."""


@dataclass(frozen=True)
class Measured:
    """The runs of one system with one number of instances: one for each seed."""

    system: str
    instances: int
    rows: Sequence[Row]

    @property
    def name(self) -> str:
        return label(self.system, self.instances)

    @property
    def is_ours(self) -> bool:
        return self.system == OURS

    @property
    def is_reference(self) -> bool:
        return self.system in REFERENCES

    @property
    def ttft_ms(self) -> list[float]:
        return sorted(ms for row in self.rows for ms in row.ttft_ms)

    def middle(self, figure: Callable[[Row], float]) -> float:
        return median(figure(row) for row in self.rows)


def measured(rows: Sequence[Row]) -> list[Measured]:
    """KVGate's runs first, the references last."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.system, row.instances), []).append(row)
    every = [Measured(system, instances, runs) for (system, instances), runs in found.items()]
    return sorted(every, key=lambda each: (each.is_reference, not each.is_ours, each.system, each.instances))
