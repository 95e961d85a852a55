"""The runs of bench.routing, put together by system and number of instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.load import Result
from bench.report.inputs import RoutingRow

OURS = "prefix_kv_aware"
REFERENCES = ("oracle", "pinned")
"""They know what no router does, and compete with nobody."""


@dataclass(frozen=True)
class Measured:
    """The runs of one system with so many instances: its seeds."""

    system: str
    instances: int
    rows: Sequence[RoutingRow]

    @property
    def name(self) -> str:
        return f"{self.system} x{self.instances}" if self.instances > 1 else self.system

    @property
    def is_ours(self) -> bool:
        return self.system == OURS

    @property
    def is_reference(self) -> bool:
        return self.system in REFERENCES

    @property
    def ttft_ms(self) -> list[float]:
        return sorted(ms for row in self.rows for ms in row.ttft_ms)

    def middle(self, figure: Callable[[RoutingRow], float]) -> float:
        return median(figure(row) for row in self.rows)


def measured(rows: Sequence[RoutingRow]) -> list[Measured]:
    """Ours first, the references last."""
    found: dict[tuple[str, int], list[RoutingRow]] = {}
    for row in rows:
        found.setdefault((row.system, row.instances), []).append(row)
    every = [Measured(system, instances, runs) for (system, instances), runs in found.items()]
    return sorted(every, key=lambda each: (each.is_reference, not each.is_ours, each.system, each.instances))


def percentile_ttft_ms(row: RoutingRow, share: float) -> float:
    """As the load client defines it."""
    return Result(ttft_s=[ms / 1000 for ms in row.ttft_ms]).percentile_ttft_s(share) * 1000
