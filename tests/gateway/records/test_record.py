from __future__ import annotations

import re

import orjson
import pytest

from gateway.records.record import DAY_MS, Record, Signer, UnsignedError

SIGNER = Signer("0123456789abcdef", "a")
FACTS = {"name": "batch", "kept_until_ms": 1000}


def written(version: int = 1, *, is_removed: bool = False, field: str = "key/k-1", **more: object) -> Record:
    return SIGNER.write(field, version, FACTS | more, is_removed=is_removed)


def test_what_is_written_is_read_again() -> None:
    record = written(7, is_removed=True)
    assert SIGNER.read("key/k-1", record.text) == record
    assert (record.kind, record.id, record.version, record.is_removed) == ("key", "k-1", 7, True)
    assert record.facts == FACTS


def test_a_text_counts_only_under_the_secret_the_namespace_and_the_field_that_it_was_written_for() -> None:
    text = written().text
    others = [
        (Signer("0123456789abcdeX", "a"), "key/k-1"),
        (Signer("0123456789abcdef", "b"), "key/k-1"),
        (SIGNER, "key/k-2"),
    ]
    for signer, field in others:
        with pytest.raises(UnsignedError, match="records_secret"):
            signer.read(field, text)


@pytest.mark.parametrize("part", [r"^1", rb" live ".decode(), "batch", "1000"])
def test_no_part_of_a_text_can_be_changed(part: str) -> None:
    text = written().text.decode()
    changed = re.sub(part, {"^1": "2", " live ": " removed ", "batch": "other", "1000": "9000"}[part], text, count=1)
    assert changed != text
    with pytest.raises(UnsignedError):
        SIGNER.read("key/k-1", changed.encode())


@pytest.mark.parametrize("text", [b"", b"1 live abc {}", b"\xff", b"1 live " + b"0" * 64 + b" {}" + b" " * 5000])
def test_what_has_not_the_form_of_a_record_is_no_record(text: bytes) -> None:
    with pytest.raises(UnsignedError):
        SIGNER.read("key/k-1", text)


def test_a_record_that_could_not_be_read_again_is_not_written() -> None:
    with pytest.raises(ValueError, match="form"):
        written(note="x" * 5000)
    with pytest.raises(ValueError, match="form"):
        written(field="key/a b")


def test_the_higher_version_is_newer_and_no_version_is_newer_than_a_removal() -> None:
    assert written(2).is_newer_than(written(1))
    assert written(1, is_removed=True).is_newer_than(written(9))
    assert not written(9).is_newer_than(written(1, is_removed=True))


def test_of_two_equal_versions_all_gateways_choose_the_same_one() -> None:
    one, other = written(2, name="one"), written(2, name="other")
    assert one.is_newer_than(other) != other.is_newer_than(one)
    assert not one.is_newer_than(one)


def test_a_record_is_forgotten_a_day_after_it_means_nothing_any_more() -> None:
    assert not written().is_over(1000 + DAY_MS)
    assert written(is_removed=True).is_over(1001 + DAY_MS)
    assert not SIGNER.write("key/k-1", 1, {}).is_over(10**15)


def test_the_text_can_be_read_with_redis_cli() -> None:
    version, state, _, told = written(3).text.split(b" ", 3)
    assert (version, state, orjson.loads(told)) == (b"3", b"live", FACTS)


def test_what_the_other_secret_has_signed_is_the_same_record_and_signed_anew() -> None:
    before, after = (
        Signer("old-secret-012345", "a", "new-secret-012345"),
        Signer("new-secret-012345", "a", "old-secret-012345"),
    )
    old, new = (signer.write("key/k-1", 3, FACTS) for signer in (before, after))
    assert old.text != new.text
    assert (after.read("key/k-1", old.text), before.read("key/k-1", new.text)) == (new, old)
    assert not old.is_newer_than(new)
    assert not new.is_newer_than(old)
    with pytest.raises(UnsignedError):
        Signer("new-secret-012345", "a").read("key/k-1", old.text)
