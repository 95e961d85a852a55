"""What one request holds of answers: counted with what all others hold, request bodies included."""

from __future__ import annotations

from gateway.admission import Admission


class Held:
    """Bytes of answers, counted until they are `let_go`."""

    __slots__ = ("_admission", "_counted_bytes")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._counted_bytes = 0

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes may be held; then they are counted. What was counted before is part of them."""
        more = size_bytes - self._counted_bytes
        if more <= 0:
            return True
        if not self._admission.try_hold(more):
            return False
        self._counted_bytes = size_bytes
        return True

    def let_go(self) -> None:
        """Nothing is held any more."""
        if self._counted_bytes:
            self._admission.let_go(self._counted_bytes)
            self._counted_bytes = 0
