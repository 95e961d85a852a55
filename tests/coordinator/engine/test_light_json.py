"""The JSON texts that may be parsed as a whole."""

from __future__ import annotations

from coordinator.engine.light_json import is_light


def test_json_of_many_objects_or_lists_is_not_light() -> None:
    assert is_light(b"[" + b"1," * 2**19 + b"1]")
    assert not is_light(b"[" + b"{}," * 2**15 + b"1]")
    assert not is_light(b"[" * 2**16)
