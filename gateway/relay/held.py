"""What one request holds of answers: counted with what all others hold, request bodies included."""

from __future__ import annotations

from gateway.request.admission import Admission


class HeldBytes:
    """Bytes of answers, counted until they are `let_go`."""

    __slots__ = ("_admission", "_counted_bytes", "_kept_bytes")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._counted_bytes = 0
        self._kept_bytes = 0

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes of the current answer may be held; then they are counted. What was counted of it before
        is part of them."""
        more = self._uncounted_bytes(size_bytes)
        if more and not self._admission.try_hold(more):
            return False
        self._counted_bytes += more
        return True

    def hold(self, size_bytes: int) -> None:
        """So many bytes of the current answer are held already: they are counted, whether there is room or not."""
        if more := self._uncounted_bytes(size_bytes):
            self._admission.hold(more)
            self._counted_bytes += more

    def _uncounted_bytes(self, size_bytes: int) -> int:
        """How much of the current answer is not counted yet."""
        return max(0, self._kept_bytes + size_bytes - self._counted_bytes)

    def keep(self) -> None:
        """What is counted stays; another answer follows."""
        self._kept_bytes = self._counted_bytes

    def let_go(self) -> None:
        """Nothing is held any more."""
        if self._counted_bytes:
            self._admission.let_go(self._counted_bytes)
            self._counted_bytes = self._kept_bytes = 0
