"""Is there room: bodies that are still coming, requests in flight, bytes held in memory; and how much one client takes.

A client is an API key; where no keys are configured, an address. While there is room for all, nobody is bounded; see
`shares` for what holds when there is not.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import ApiError
from gateway.request.fairness import FairShares
from gateway.request.keyring import Caller
from gateway.settings.limit_settings import LimitSettings

_RETRY_AFTER = {"retry-after": "1"}
_ANSWERS = "answers"
"""Who holds what replicas have answered."""


class Admission:
    """What a gateway has room for."""

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits
        self.uploads = FairShares(limits.max_uploads, time.monotonic)
        self.requests = FairShares(limits.max_in_flight, time.monotonic)
        self.held_bytes = FairShares(limits.max_buffered_bytes, time.monotonic)

    def __repr__(self) -> str:
        uploads, requests, held = self.uploads.taken, self.requests.taken, self.held_bytes.taken
        return f"<Admission {uploads} uploads, {requests} in flight, {held} bytes held>"

    def admit(self, holder: str) -> AdmissionSlot:
        """What one request will take, nothing yet."""
        return AdmissionSlot(self, holder)

    def try_hold(self, count: int) -> bool:
        """Account for bytes of an answer, if there is room for them."""
        return self.held_bytes.try_take(_ANSWERS, count)

    def hold(self, count: int) -> None:
        """Account for bytes of an answer that are held already."""
        self.held_bytes.take(_ANSWERS, count)

    def let_go(self, count: int) -> None:
        """Give back what `try_hold` and `hold` took."""
        self.held_bytes.give_back(_ANSWERS, count)


class AdmissionSlot:
    """What one request takes: `release` gives all of it back, at every ending."""

    __slots__ = ("_admission", "_held_bytes", "_is_in_flight", "_is_upload", "holder")

    def __init__(self, admission: Admission, holder: str) -> None:
        self.holder = holder
        self._admission = admission
        self._held_bytes = 0
        self._is_upload = self._is_in_flight = False

    def upload(self) -> None:
        """Its body is still coming. Raises a 429 where too many are."""
        self._is_upload = self._admission.uploads.try_take(self.holder, 1)
        if not self._is_upload:
            raise _overloaded("receives as many bodies as it may", "limits.max_uploads")

    def begin(self) -> None:
        """Its body is here: from now on it is in flight. Raises a 429 where too many are."""
        if self._is_upload:
            self._is_upload = False
            self._admission.uploads.give_back(self.holder, 1)
        self._is_in_flight = self._admission.requests.try_take(self.holder, 1)
        if not self._is_in_flight:
            raise _overloaded("has as many requests in flight as it may", "limits.max_in_flight", closes=False)

    def check_size(self, size_bytes: int) -> None:
        """Raises a 413 for a body of this size, received or only announced, if it is too large."""
        limit = self._admission.limits.max_body_bytes
        if size_bytes > limit:
            raise ApiError(
                413,
                "request_too_large",
                f"body: larger than this gateway's limit of {limit} bytes (limits.max_body_bytes).",
                "body",
                headers={"connection": "close"},
            )

    def hold(self, count: int) -> None:
        """Account for `count` more bytes. Raises a 429 where that is too much."""
        if not self._admission.held_bytes.try_take(self.holder, count):
            raise _overloaded("holds as many bytes of requests as it may", "limits.max_buffered_bytes")
        self._held_bytes += count

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Account for `count` more bytes for as long as the block runs. Raises a 429 where that is too much."""
        self.hold(count)
        try:
            yield
        finally:
            self._let_go(count)

    def set_held_bytes(self, count: int) -> None:
        """So many bytes is what is left of it, or what it has become."""
        if count > self._held_bytes:
            self.hold(count - self._held_bytes)
        else:
            self._let_go(self._held_bytes - count)

    def _let_go(self, count: int) -> None:
        if count:
            self._admission.held_bytes.give_back(self.holder, count)
            self._held_bytes -= count

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def release(self) -> None:
        """All of it is free again. Twice is harmless."""
        self._let_go(self._held_bytes)
        if self._is_upload:
            self._is_upload = False
            self._admission.uploads.give_back(self.holder, 1)
        if self._is_in_flight:
            self._is_in_flight = False
            self._admission.requests.give_back(self.holder, 1)


def holder_of(caller: Caller, peer: str) -> str:
    """Whose share a request is of: the API key's, else the address'. IPv6 hosts have a /64 network each."""
    if caller.key:
        return f"key {caller.key}"
    if ":" not in peer:
        return peer
    address = ipaddress.IPv6Address(peer.partition("%")[0])
    return str(address.ipv4_mapped or int(address) >> 64)


def _overloaded(what: str, setting: str, *, closes: bool = True) -> ApiError:
    """`closes`: the rest of the body is not wanted."""
    message = f"This gateway {what} ({setting}), or as many of one client's while others wait. Retry shortly."
    headers = {**_RETRY_AFTER, "connection": "close"} if closes else _RETRY_AFTER
    return ApiError(429, "gateway_overloaded", message, headers=dict(headers))
