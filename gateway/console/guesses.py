"""Slows down who tries keys at the console's login. Pure, but for a log line."""

from __future__ import annotations

from collections import OrderedDict

import structlog

from gateway.errors import ApiError

_log = structlog.get_logger("kvgate.console")

_AT_ONCE = 10.0
_PER_S = 10 / 60
"""One address may fail ten times at once, then ten times a minute."""
_MOST_ADDRESSES = 10_000


class Guesses:
    """The failed logins of each address."""

    def __init__(self) -> None:
        self._failed: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Address → how many of its failures count, and when that was so (monotonic time)."""

    def check(self, address: str, now_s: float) -> None:
        """Raises a 429 if too many logins from there have failed. Then its key is not looked at."""
        failed = self._counted(address, now_s)
        if failed > _AT_ONCE - 1:
            wait_s = (failed - _AT_ONCE + 1) / _PER_S
            message = "Too many failed logins from this address; try again shortly."
            raise ApiError(429, "too_many_logins", message, headers={"retry-after": str(round(wait_s) + 1)})

    def failed(self, address: str, code: str, now_s: float) -> None:
        """A login was refused."""
        self._failed[address] = min(self._counted(address, now_s) + 1, _AT_ONCE), now_s
        self._failed.move_to_end(address)
        if len(self._failed) > _MOST_ADDRESSES:
            self._failed.popitem(last=False)
        _log.warning("login refused", address=address, code=code)

    def _counted(self, address: str, now_s: float) -> float:
        failed, at_s = self._failed.get(address, (0.0, now_s))
        return max(0.0, failed - (now_s - at_s) * _PER_S)
