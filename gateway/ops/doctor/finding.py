"""What the doctor says: a finding with its fix, or that something could not be checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
"""An error is unsafe, or keeps something from working; a warning costs speed, memory or certainty."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing that can be wrong. `fix` is what one can type or set; in braces is what `seen` fills in."""

    code: str
    severity: Severity
    why: str
    fix: str

    def seen(self, subject: str, what: str, **values: object) -> Finding:
        """It is so with `subject`: `what` says it with the value seen."""
        return Finding(self.code, self.severity, subject, what, self.why, self.fix.format(**values))


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    code: str
    severity: Severity
    subject: str
    what: str
    why: str
    fix: str


@dataclass(frozen=True, slots=True)
class Unchecked:
    """Something that may be wrong, for all the doctor knows."""

    subject: str
    what: str
    why: str


Result = Finding | Unchecked
