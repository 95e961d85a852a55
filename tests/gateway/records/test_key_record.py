from __future__ import annotations

from dataclasses import replace

from gateway.records.key_record import KeyRecord, is_revoked, key_records, state_of
from gateway.records.record import Signer
from gateway.settings.queue_settings import AccountLimitSettings

SIGNER = Signer("0123456789abcdef", "")
ROOT = KeyRecord("k-1", "root", "ab" * 32, "team", False, True, ("sim",), 1000, 2000, "ops", 0)
CHILD = replace(ROOT, id="k-2", made_by="k-1")
GRANDCHILD = replace(ROOT, id="k-3", made_by="k-2")


def by_id(*keys: KeyRecord) -> dict[str, KeyRecord]:
    return {key.id: key for key in keys}


def test_a_record_tells_all_of_a_key_but_the_key() -> None:
    record = SIGNER.write(ROOT.field, 3, ROOT.facts(), is_removed=True)
    assert key_records([record]) == {"k-1": replace(ROOT, version=3, is_removed=True)}


def test_a_record_of_a_later_version_can_be_read_and_one_that_lacks_something_is_left_out() -> None:
    limits = {"requests_per_min": 1, "dollars_per_day": 2}
    later = SIGNER.write(ROOT.field, 1, ROOT.facts() | {"labels": ["a"], "limits": limits})
    lacking = SIGNER.write(CHILD.field, 1, {"name": "child"})
    assert key_records([later, lacking]) == {"k-1": replace(ROOT, limits=AccountLimitSettings(requests_per_min=1))}


def test_a_record_of_an_earlier_version_has_no_limits_and_an_account_of_its_own() -> None:
    facts = {name: value for name, value in ROOT.facts().items() if name not in ("limits", "account")}
    assert key_records([SIGNER.write(ROOT.field, 1, facts)]) == {"k-1": ROOT}


def test_a_key_ends_with_the_key_that_has_made_it() -> None:
    keys = by_id(replace(ROOT, is_removed=True), CHILD, GRANDCHILD)
    assert is_revoked(GRANDCHILD, keys)
    keys = by_id(ROOT, replace(CHILD, is_removed=True), GRANDCHILD)
    assert [is_revoked(key, keys) for key in keys.values()] == [False, True, True]


def test_a_key_outlives_the_end_of_the_key_that_has_made_it_if_that_was_only_replaced() -> None:
    keys = by_id(replace(ROOT, expires_ms=10), CHILD)
    assert [state_of(key, keys, 500) for key in keys.values()] == ["expired", "valid"]
    assert not is_revoked(CHILD, by_id(CHILD)), "its maker's record is forgotten"


def test_the_digest_of_a_key_depends_on_the_secret_and_is_nothing_that_is_used_elsewhere() -> None:
    other = Signer("another-secret-0123", "")
    digests = {SIGNER.digest(b"key"), other.digest(b"key"), SIGNER.session_secret(b"key")}
    assert len(digests) == 3
