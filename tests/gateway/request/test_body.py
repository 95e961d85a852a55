"""Bodies are received whole, within the limits, and not too slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.deadlines import Deadlines
from gateway.errors import ApiError
from gateway.request import body as bodies
from gateway.request.admission import Admission, AdmissionSlot
from gateway.request.body import accept_body, receive_body
from gateway.settings.limit_settings import LimitSettings

LIMITS = LimitSettings(max_body_bytes=4096)


def coming(*pieces: bytes) -> Callable[[], Awaitable[bytes]]:
    left = [*pieces, b""]

    async def more() -> bytes:
        return left.pop(0) if len(left) > 1 else b""

    return more


@pytest.fixture
def admission() -> Admission:
    return Admission(LIMITS)


@pytest.fixture
def slot(admission: Admission) -> AdmissionSlot:
    return admission.admit("somebody")


@pytest.mark.parametrize("pieces", [[], [b"whole"], [b"in", b"three", b"pieces"]])
async def test_a_body_is_what_its_pieces_are_and_all_of_it_is_accounted_for(
    admission: Admission, slot: AdmissionSlot, pieces: list[bytes]
) -> None:
    assert await receive_body(slot, {}, coming(*pieces), Deadlines(), 600) == b"".join(pieces)
    assert admission.held_bytes.taken == len(b"".join(pieces))


@pytest.mark.parametrize("pieces", [[b"a" * 5000], [b"a" * 4000, b"b" * 100]])
async def test_a_body_that_is_too_large_is_refused_as_soon_as_that_is_known(
    slot: AdmissionSlot, pieces: list[bytes]
) -> None:
    with pytest.raises(ApiError) as refused:
        await receive_body(slot, {}, coming(*pieces), Deadlines(), 600)
    assert refused.value.status == 413


def test_a_body_that_is_here_is_bounded_and_accounted_for_as_well(admission: Admission, slot: AdmissionSlot) -> None:
    assert accept_body(slot, {}, b"whole") == b"whole"
    assert admission.held_bytes.taken == 5
    with pytest.raises(ApiError) as refused:
        accept_body(slot, {}, b"a" * 5000)
    assert refused.value.status == 413


async def test_a_body_that_comes_too_slowly_is_given_up_long_before_its_time_is_over(
    slot: AdmissionSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 0.01)
    sent = 0

    async def drop_by_drop() -> bytes:
        nonlocal sent
        sent += 1
        await asyncio.sleep(0.005)
        return b"x"

    with pytest.raises(ApiError) as refused:
        await receive_body(slot, {}, drop_by_drop, Deadlines(), 600)
    assert (refused.value.status, refused.value.code) == (408, "body_timeout")
    assert "1024 bytes per second" in refused.value.message


async def test_a_body_that_comes_fast_enough_is_given_up_when_its_time_is_over(slot: AdmissionSlot) -> None:
    async def steadily() -> bytes:
        await asyncio.sleep(0.005)
        return b"x" * 20

    with pytest.raises(ApiError) as refused:
        await receive_body(slot, {}, steadily, Deadlines(), 0.1)
    assert (refused.value.status, refused.value.code) == (408, "body_timeout")


async def test_a_body_that_comes_fast_enough_may_take_its_time(
    slot: AdmissionSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 0.5)
    monkeypatch.setattr(bodies, "MIN_BYTES_PER_S", 100)
    pieces = [b"x" * 100] * 30
    read = coming(*pieces)

    async def steadily() -> bytes:
        await asyncio.sleep(0.03)
        return await read()

    assert await receive_body(slot, {}, steadily, Deadlines(), 600) == b"x" * 3000
