"""Limits what requests take of a gateway: uploads, requests in flight, and bytes held in memory.

An upload is a body that the gateway still receives. `fairness` shares each limit between clients. A client is an API
key; if no keys are configured, it is an address.
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

MAX_UPLOADS = 4096
"""Four times the default of requests in flight, so clients that send slowly keep no other client out."""
_RETRY_AFTER = {"retry-after": "1"}
_ANSWERS = "answers"
"""The holder of the bytes of all answers."""


class Admission:
    """The limits of a gateway, and how much of each is taken."""

    def __init__(self, limits: LimitSettings) -> None:
        self.uploads = FairShares(MAX_UPLOADS, time.monotonic)
        self.requests = FairShares(limits.max_in_flight, time.monotonic)
        self.held_bytes = FairShares(limits.max_buffered_bytes, time.monotonic)
        self.use(limits)

    def use(self, limits: LimitSettings) -> None:
        """Other limits hold from now on. Nothing is taken from a request that runs."""
        self.limits = limits
        self.requests.limit, self.held_bytes.limit = limits.max_in_flight, limits.max_buffered_bytes

    def __repr__(self) -> str:
        uploads, requests, held = self.uploads.taken, self.requests.taken, self.held_bytes.taken
        return f"<Admission {uploads} uploads, {requests} in flight, {held} bytes held>"

    def admit(self, holder: str) -> AdmissionSlot:
        """The slot of a new request. It takes nothing yet."""
        return AdmissionSlot(self, holder)

    def try_hold(self, count: int) -> bool:
        """Counts `count` bytes of an answer as held. False if that exceeds the limit."""
        return self.held_bytes.try_take(_ANSWERS, count)

    def try_spare(self, count: int, share: float) -> bool:
        """Counts `count` bytes as held if no more than this share of the limit is held then."""
        has_room = self.held_bytes.taken + count <= share * self.held_bytes.limit
        return has_room and self.try_hold(count)

    def hold(self, count: int) -> None:
        """Counts `count` bytes of an answer that are in memory already, even if that exceeds the limit."""
        self.held_bytes.take(_ANSWERS, count)

    def let_go(self, count: int) -> None:
        """Gives back bytes that `try_hold` or `hold` counted."""
        self.held_bytes.give_back(_ANSWERS, count)


class AdmissionSlot:
    """What one request takes of the gateway's limits. `release` gives all of it back, however the request ends."""

    __slots__ = ("_admission", "_held_bytes", "_is_in_flight", "_is_upload", "holder")

    def __init__(self, admission: Admission, holder: str) -> None:
        self.holder = holder
        self._admission = admission
        self._held_bytes = 0
        self._is_upload = self._is_in_flight = False

    def begin_upload(self) -> None:
        """Counts the request as an upload. Raises a 429 if there are too many."""
        self._is_upload = self._admission.uploads.try_take(self.holder, 1)
        if not self._is_upload:
            raise _overloaded("uploads")

    def begin(self) -> None:
        """Counts the request as in flight: its body is complete. Raises a 429 if too many requests are in flight."""
        if self._is_upload:
            self._is_upload = False
            self._admission.uploads.give_back(self.holder, 1)
        self._is_in_flight = self._admission.requests.try_take(self.holder, 1)
        if not self._is_in_flight:
            raise _overloaded("requests in flight (limits.max_in_flight)", closes=False)

    def check_size(self, size_bytes: int) -> None:
        """Raises a 413 if a body of this size is too large. The size may be received or announced."""
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
        """Counts `count` more bytes as held. Raises a 429 if that is too much."""
        if not self._admission.held_bytes.try_take(self.holder, count):
            raise _overloaded("bytes held for requests (limits.max_buffered_bytes)")
        self._held_bytes += count

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Counts `count` more bytes as held until the block ends. Raises a 429 if that is too much."""
        self.hold(count)
        try:
            yield
        finally:
            self._let_go(count)

    def set_held_bytes(self, count: int) -> None:
        """Changes the bytes that the request holds to `count`. Raises a 429 if that is too much."""
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
        """Gives back all that the request takes. May be called twice."""
        self._let_go(self._held_bytes)
        if self._is_upload:
            self._is_upload = False
            self._admission.uploads.give_back(self.holder, 1)
        if self._is_in_flight:
            self._is_in_flight = False
            self._admission.requests.give_back(self.holder, 1)


def holder_of(caller: Caller, peer: str) -> str:
    """The holder under which a request counts: the caller's API key; its tenant for a key that was made while gateways
    ran; the peer's address if no keys are configured. Of an IPv6 address only the /64 network counts, because one
    host may use all addresses in it."""
    if caller.is_recorded:
        return f"tenant {caller.tenant}"
    if caller.key:
        return f"key {caller.key}"
    if ":" not in peer:
        return peer
    address = ipaddress.IPv6Address(peer.partition("%")[0])
    return str(address.ipv4_mapped or int(address) >> 64)


def _overloaded(limited: str, *, closes: bool = True) -> ApiError:
    """A 429. With `closes`, the connection is closed, because the gateway does not read the rest of the body."""
    message = (
        f"This gateway has reached its limit of {limited}, or your share of it while other clients wait. Retry shortly."
    )
    headers = {**_RETRY_AFTER, "connection": "close"} if closes else _RETRY_AFTER
    return ApiError(429, "gateway_overloaded", message, headers=dict(headers))
