"""A measurement with its goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement of a part."""

    part: ClassVar[str]
    goals: Mapping[str, bool] = field(default_factory=dict)
    """Whether each goal was met, by its words. Empty if the row is there to compare with."""

    @property
    def missed(self) -> list[str]:
        return [goal for goal, is_met in self.goals.items() if not is_met]

    @property
    def verdict(self) -> str:
        """For a table."""
        return "MISSED" if self.missed else "met" if self.goals else "-"

    def as_dict(self) -> dict[str, Any]:
        return {"part": self.part} | asdict(self)
