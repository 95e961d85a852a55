"""What a check says: a finding with its fix, or that something could not be checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
"""An error is unsafe, or keeps something from working. A warning costs speed, memory or certainty."""


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One thing that can be wrong. `fix` is something to type or to set; `seen` fills in the names in braces."""

    code: str
    severity: Severity
    why: str
    fix: str
    conditions: tuple[str, ...] = ()
    """The conditions of the watch over Redis that mean the same. The watch reports this kind as the first of them."""

    def seen(self, subject: str, what: str, **values: object) -> Finding:
        """A finding of this kind about `subject`. `what` describes it, with the value that was seen."""
        return Finding(self, subject, what, self.fix.format(**values))


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    kind: FindingKind
    subject: str
    what: str
    fix: str

    @property
    def code(self) -> str:
        return self.kind.code

    @property
    def severity(self) -> Severity:
        return self.kind.severity

    @property
    def why(self) -> str:
        return self.kind.why

    @property
    def sentence(self) -> str:
        """The finding in one line, for logs and for /ready."""
        return f"{self.what}: {self.why}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Unchecked:
    """Something that could not be checked, and why."""

    subject: str
    what: str
    why: str


Result = Finding | Unchecked
