"""Counts the bytes of answers that one request holds, together with those of all other requests and their bodies."""

from __future__ import annotations

from gateway.request.admission import Admission


class HeldBytes:
    """Bytes of answers, counted until `let_go`."""

    __slots__ = ("_admission", "_counted_bytes", "_kept_bytes")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._counted_bytes = 0
        self._kept_bytes = 0

    def has_room(self, size_bytes: int) -> bool:
        """Whether this many bytes of the current answer may be held. If so, they are counted. Bytes of this answer that
        were counted before are part of them."""
        more = self._uncounted_bytes(size_bytes)
        if more and not self._admission.try_hold(more):
            return False
        self._counted_bytes += more
        return True

    def hold(self, size_bytes: int) -> None:
        """Counts this many bytes of the current answer, whether there is room or not: they are held already."""
        if more := self._uncounted_bytes(size_bytes):
            self._admission.hold(more)
            self._counted_bytes += more

    def _uncounted_bytes(self, size_bytes: int) -> int:
        """Bytes of the current answer that are not counted yet."""
        return max(0, self._kept_bytes + size_bytes - self._counted_bytes)

    def keep(self) -> None:
        """Keeps what is counted. The bytes of another answer follow."""
        self._kept_bytes = self._counted_bytes

    def let_go(self) -> None:
        """Counts nothing any more."""
        if self._counted_bytes:
            self._admission.let_go(self._counted_bytes)
            self._counted_bytes = self._kept_bytes = 0
