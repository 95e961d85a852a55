"""What the holder of a key may do with other keys. (tests/cluster/test_keys_in_redis.py shows it at four gateways.)"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any, cast

import orjson
import pytest

from coordinator.records import AuditEntry, AuditNote, RecordChange, RecordsState, RecordStore
from coordinator.store import Store, StoreOptions
from gateway.control import keys as control
from gateway.control.keys import Keys
from gateway.errors import ApiError
from gateway.records.record import DAY_MS, Signer
from gateway.records.record_book import RecordBook
from gateway.request.keyring import Caller, Keyring
from gateway.settings.gateway_settings import ApiKey, SecuritySettings


class Texts:
    """A store of records that has only one gateway."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self.notes: list[AuditNote] = []

    async def look(self) -> RecordsState:
        return RecordsState(b"%d" % len(self.notes), len(self.texts))

    async def read(self) -> dict[str, bytes]:
        return dict(self.texts)

    async def put(self, changes: Iterable[RecordChange], note: AuditNote) -> bool:
        self.texts |= {change.field: change.text for change in changes}
        self.notes.append(note)
        return True

    async def audit(self, most: int) -> list[AuditEntry]:
        return [AuditEntry(0, note) for note in self.notes[::-1][:most]]


class Holder:
    """Somebody with a key, at one gateway."""

    def __init__(self, keys: Keys, keyring: Keyring, text: str) -> None:
        self._keys, self._keyring, self._text = keys, keyring, text

    @property
    def caller(self) -> Caller:
        return self._keyring.identify({"x-api-key": self._text})

    def having(self, made: dict[str, Any]) -> Holder:
        return Holder(self._keys, self._keyring, made["key"])

    async def create(self, **body: Any) -> dict[str, Any]:
        return await self._keys.create(self.caller, orjson.dumps({"name": "new"} | body))

    async def rotate(self, key: dict[str, Any], **body: Any) -> dict[str, Any]:
        return await self._keys.rotate(self.caller, key["id"], orjson.dumps(body))

    async def revoke(self, key: dict[str, Any]) -> dict[str, Any]:
        return await self._keys.revoke(self.caller, key["id"])

    async def names(self) -> set[str]:
        return {key["name"] for key in await self._keys.listed(self.caller)}


def gateway(*, has_secret: bool = True) -> Holder:
    """The admin of a gateway whose configuration has only the admin's key."""
    book = RecordBook(Store(StoreOptions("redis://none", 1.0), "gw0"), Signer("0123456789abcdef", ""), "")
    book._store = cast("RecordStore", Texts())
    if not has_secret:
        book.signer = None
    root = ApiKey(name="root", sha256=sha256(b"root").hexdigest(), tenant="ops", admin=True)
    keyring = Keyring(SecuritySettings.model_validate({"api_keys": [root], "share_cache": True}), book)
    return Holder(Keys(book, keyring), keyring, "root")


@pytest.fixture
async def root() -> Holder:
    holder = gateway()
    await holder.names()  # the store was read
    return holder


async def code_of(attempt: Any) -> str:
    with pytest.raises(ApiError) as error:
        await attempt
    return error.value.code


async def test_a_key_lives_90_days_or_as_long_as_was_asked_and_never_over_a_year(root: Holder) -> None:
    made = [await root.create(name=f"{days}", expires_days=days) for days in (None, 1, 365)]
    assert [round((key["expires_ms"] - key["made_ms"]) / DAY_MS) for key in made] == [90, 1, 365]
    assert await code_of(root.create(expires_days=366)) == "invalid_value"


async def test_a_name_is_used_once_in_a_tenant_while_its_key_is_valid(root: Holder) -> None:
    made = await root.create(tenant="a")
    assert await code_of(root.create(tenant="a")) == "name_taken"
    assert await code_of(root.create(name="root")) == "name_taken"
    await root.create(tenant="b")
    await root.revoke(made)
    await root.create(tenant="a")


async def test_a_manager_of_keys_reaches_no_other_tenants_and_no_admins(root: Holder) -> None:
    manager = root.having(await root.create(name="manager", tenant="a", manages_keys=True, models=["small"]))
    foreign, admin = await root.create(tenant="b"), await root.create(name="boss", tenant="a", admin=True)
    for beyond in ({"tenant": "b"}, {"admin": True}, {"models": ["large"]}, {"expires_days": 91}):
        assert await code_of(manager.create(**beyond)) == "beyond_own_key", beyond
    for key in (foreign, admin):
        assert await code_of(manager.revoke(key)) == "key_not_found"
        assert await code_of(manager.rotate(key)) == "key_not_found"
    own = await manager.create(name="own")
    assert (own["tenant"], own["models"], own["admin"], own["manages_keys"]) == ("a", ("small",), False, False)
    assert await manager.names() == {"manager", "boss", "own"}
    assert await code_of(root.having(own).names()) == "admin_key_required"
    wider = await root.create(name="wider", tenant="a")
    assert await code_of(manager.rotate(wider)) == "beyond_own_key", "it may use models that the manager may not"


async def test_a_key_with_limits_makes_and_replaces_only_keys_within_them(root: Holder) -> None:
    own = {"concurrency": 2, "tokens_per_min": 1000}
    lead = root.having(await root.create(name="lead", tenant="a", manages_keys=True, limits=own))
    for limits, param in (
        ({}, "limits.concurrency"),
        ({"concurrency": 3, "tokens_per_min": 1}, "limits.concurrency"),
        ({"concurrency": 2}, "limits.tokens_per_min"),
    ):
        with pytest.raises(ApiError, match="or less") as error:
            await lead.create(limits=limits)
        assert (error.value.code, error.value.param) == ("beyond_own_key", param)
    made = await lead.create(limits={"concurrency": 2, "tokens_per_min": 999, "requests_per_min": 7})
    assert made["limits"] == {"concurrency": 2, "requests_per_min": 7, "tokens_per_min": 999}
    wider = await root.create(name="wider", tenant="a", limits={"concurrency": 2, "tokens_per_min": 1001})
    assert await code_of(lead.rotate(wider)) == "beyond_own_key"
    listed = {key["name"]: key["limits"] for key in await root._keys.listed(root.caller)}
    assert (listed["lead"], listed["root"]) == (own, {})


async def test_a_key_keeps_its_limits_and_its_account_when_it_is_replaced_again_and_again(root: Holder) -> None:
    first = await root.create(limits={"requests_per_min": 5})
    second = await root.rotate(first)
    third = await root.rotate(second)
    assert third["limits"] == {"requests_per_min": 5}
    accounts = {root.having(key).caller.account for key in (first, second, third)}
    assert accounts == {first["id"]}


async def test_no_key_outlives_the_key_that_makes_it(root: Holder) -> None:
    short = await root.create(name="short", tenant="a", admin=True, expires_days=2)
    holder = root.having(short)
    assert (await holder.create())["expires_ms"] == short["expires_ms"]
    assert (await holder.rotate(short))["expires_ms"] == short["expires_ms"]
    assert await code_of(holder.create(name="other", expires_days=3)) == "beyond_own_key"


async def test_a_replaced_key_ends_after_the_overlap_or_when_it_would_have_ended(root: Holder) -> None:
    long, short = await root.create(name="long"), await root.create(name="short", expires_days=0.5)
    replaced = (await root.rotate(long, overlap_s=60))["replaces"]
    assert replaced["id"] == long["id"]
    assert abs(replaced["expires_ms"] - long["made_ms"] - 60_000) < 10_000
    assert (await root.rotate(short))["replaces"]["expires_ms"] == short["expires_ms"]
    gone = await root.create(name="gone")
    await root.revoke(gone)
    assert await code_of(root.rotate(gone)) == "key_not_valid"


async def test_a_replaced_key_is_not_replaced_again_unless_the_newer_ones_are_revoked(root: Holder) -> None:
    first = await root.create(expires_days=90)
    second = await root.rotate(first, overlap_s=20 * 86_400)
    third = await root.rotate(second, overlap_s=0)
    with pytest.raises(ApiError, match=f"rotate {third['id']}, or revoke it") as error:
        await root.rotate(first)
    assert error.value.code == "key_rotated"
    await root.revoke(third)
    assert (await root.rotate(first))["in_place_of"] == first["id"]


async def test_a_tenant_has_so_many_keys_at_most_and_revoked_ones_count_until_their_end(
    root: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_MOST_VALID", 2)
    monkeypatch.setattr(control, "_MOST_OF_TENANT", 3)
    first, _ = [await root.create(name=name, tenant="a") for name in ("1", "2")]
    assert await code_of(root.create(name="3", tenant="a")) == "too_many_keys"
    assert await code_of(root.rotate(first)) == "too_many_keys"
    await root.create(tenant="b")
    await root.revoke(first)
    third = await root.create(name="3", tenant="a")
    await root.revoke(third)
    assert await code_of(root.create(name="4", tenant="a")) == "too_many_keys"


async def test_a_key_of_the_file_is_listed_without_its_digest_and_is_changed_in_the_file(root: Holder) -> None:
    [listed] = await root._keys.listed(root.caller)
    assert (listed["id"], listed["state"]) == ("root", "configured")
    assert "sha256" not in listed
    assert await code_of(root.revoke({"id": "root"})) == "key_in_configuration"


async def test_without_a_secret_none_can_be_made_and_the_refusal_says_what_to_set() -> None:
    holder = gateway(has_secret=False)
    for attempt in (holder.create(), holder.rotate({"id": "k"}), holder.revoke({"id": "k"})):
        with pytest.raises(ApiError, match="KVGATE_RECORDS_SECRET"):
            await attempt
    assert await holder.names() == {"root"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"models": []}, "models"),
        ({"admin": 1}, "admin"),
        ({"expires_days": 0}, "expires_days"),
        ({"limit": 1}, "limit"),
        ({"limits": {"concurrency": 0}}, "limits.concurrency"),
        ({"limits": {"requests": 1}}, "limits.requests"),
        ({"models": ["m" * 100] * 50}, "models"),
    ],
)
async def test_a_wrong_field_is_named(root: Holder, body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        await root.create(**body)
    assert (error.value.status, error.value.param) == (400, param)


MONTHLY = {"per": "month", "money": 10.0, "soft": 0.8}


@pytest.mark.parametrize(
    "budgets",
    [[], [MONTHLY | {"money": 10.01}], [MONTHLY | {"per": "week"}], [{"per": "month", "tokens": 5}]],
)
async def test_a_key_with_a_budget_makes_no_key_with_more(root: Holder, budgets: list[dict[str, Any]]) -> None:
    lead = root.having(await root.create(name="lead", tenant="a", manages_keys=True, budgets=[MONTHLY]))
    with pytest.raises(ApiError) as refused:
        await lead.create(budgets=budgets)
    assert (refused.value.code, refused.value.param) == ("beyond_own_key", "budgets")


async def test_a_keys_budgets_are_kept_and_shared_when_it_is_replaced(root: Holder) -> None:
    first = await root.create(budgets=[MONTHLY, {"per": "day", "tokens": 7}])
    second = await root.rotate(first)
    assert second["budgets"] == [MONTHLY, {"per": "day", "tokens": 7, "soft": 0.8}]
    callers = root.having(first).caller, root.having(second).caller
    assert callers[0].budgets == callers[1].budgets
    assert callers[0].account == callers[1].account


@pytest.mark.parametrize(
    "budget",
    [{"per": "year", "money": 1}, {"per": "day"}, {"per": "day", "money": 1, "tokens": 1}, {"per": "day", "money": 0}],
)
async def test_a_budget_that_cannot_be_is_refused(root: Holder, budget: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        await root.create(budgets=[budget])
    assert refused.value.status == 400
    with pytest.raises(ApiError, match=r"\bbudgets: two budgets of money per month"):
        await root.create(budgets=[MONTHLY, MONTHLY | {"money": 5.0}])
