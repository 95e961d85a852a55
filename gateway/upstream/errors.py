"""The error between a gateway and a replica."""

from __future__ import annotations


class UpstreamError(Exception):
    """A replica did not answer, or stopped answering. `reason` is refused, reset, timeout, idle, protocol or
    head_too_large; inside this package also stale: a connection that was kept ended before any byte of an answer."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
