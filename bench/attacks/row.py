"""The result of one attack, compared with the goals."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

HELD_MS = 50.0
BACK_WITHIN_MB = 20.0


@dataclass(frozen=True)
class Row:
    """One attack. `missed` names the missed goals. Figures are 0 if the gateway could not be watched."""

    attack: str
    sent: str
    got: str
    """The client's result: status and code, or how the connection ended."""
    seconds: float = 0.0
    """Until the client had this result."""
    idle_ms: float = 0.0
    """The worst delay of /health before the attack."""
    health_ms: float = 0.0
    """The worst delay of /health, from the start of the attack until memory was back, or until 10 s after its end."""
    held_ms: float = 0.0
    """The same, without the time that the gateway or the probe waited for a core."""
    health_failed: int = 0
    before_mb: float = 0.0
    peak_mb: float = 0.0
    after_mb: float = 0.0
    is_killed: bool = False
    """Whether the gateway took more memory than this run allows and was killed."""
    is_alive: bool = True
    honest_answered: int = 0
    honest_refused: dict[str, int] | None = None
    """Counts by status and code, or by how the connection ended."""
    honest_ms: float = 0.0
    """The worst wait of the honest client."""
    missed: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def judged(self) -> Row:
        """Adds the missed goals behind those that the attack itself reports."""
        missed = list(self.missed)
        if self.is_killed:
            missed.append(f"killed at {self.peak_mb:,.0f} MB")
        elif not self.is_alive:
            missed.append("the gateway died")
        else:
            if self.held_ms > HELD_MS:
                missed.append(f"/health held up for {self.held_ms:,.0f} ms, of {HELD_MS:g}")
            if self.health_failed:
                missed.append(f"/health failed {self.health_failed} times")
            if self.after_mb > self.before_mb + BACK_WITHIN_MB:
                missed.append(f"{self.after_mb - self.before_mb:,.0f} MB kept, of {BACK_WITHIN_MB:g}")
        if self.honest_refused:
            missed.append(f"the honest client refused {sum(self.honest_refused.values())} times")
        return replace(self, missed=tuple(missed))

    @property
    def honest(self) -> str:
        """The honest client's results in words."""
        parts = [f"{self.honest_answered:,} answered"]
        parts += [f"{count:,} x {kind}" for kind, count in (self.honest_refused or {}).items()]
        return f"{', '.join(parts)}; {self.honest_ms:,.0f} ms at worst"
