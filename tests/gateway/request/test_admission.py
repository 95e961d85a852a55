"""Limits of uploads, requests and bytes. A slot gives back all that its request took, however the request ends."""

from __future__ import annotations

import pytest

from gateway.errors import ApiError
from gateway.request.admission import Admission, holder_of
from gateway.request.keyring import Caller
from gateway.settings.limit_settings import LimitSettings

EMPTY = "<Admission 0 uploads, 0 in flight, 0 bytes held>"


def test_the_next_request_over_the_limit_is_a_429_until_one_ends() -> None:
    admission = Admission(LimitSettings(max_in_flight=1))
    first, second = admission.admit("a"), admission.admit("b")
    first.begin()
    with pytest.raises(ApiError) as refused:
        second.begin()
    assert (refused.value.status, refused.value.headers) == (429, {"retry-after": "1"})
    first.release()
    second.begin()
    second.release()
    assert repr(admission) == EMPTY


def test_bodies_that_are_still_coming_take_no_request_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.request.admission.MAX_UPLOADS", 2)
    admission = Admission(LimitSettings(max_in_flight=1))
    slow = [admission.admit("slow") for _ in range(2)]
    for slot in slow:
        slot.begin_upload()
    with pytest.raises(ApiError) as refused:
        admission.admit("slow").begin_upload()
    assert refused.value.headers["connection"] == "close"
    admission.admit("other").begin()
    for slot in slow:
        slot.release()
        slot.release()
    assert repr(admission) == "<Admission 0 uploads, 1 in flight, 0 bytes held>"


def test_what_is_refused_for_a_while_is_not_held() -> None:
    admission = Admission(LimitSettings(max_buffered_bytes=1024))
    slot = admission.admit("a")
    with pytest.raises(ApiError), slot.holding(2000):
        pass
    slot.release()
    assert repr(admission) == EMPTY


@pytest.mark.parametrize(
    ("peer", "holder"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", str(0x2001_0DB8_0001_0002)),
        ("fe80::1%eth0", str(0xFE80 << 48)),
        ("", ""),
    ],
)
def test_without_a_key_a_share_is_an_addresss_and_of_ipv6_a_networks(peer: str, holder: str) -> None:
    assert holder_of(Caller(None, True), peer) == holder
    assert holder_of(Caller("tenant", False, "team-a"), peer) == "key team-a"
    made = Caller("tenant", False, "team-a", is_recorded=True)
    assert holder_of(made, peer) == "tenant tenant", "a tenant that makes keys gets no more with each"
