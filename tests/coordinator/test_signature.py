"""A script's header defines locals for its body, and a Python function for its callers."""

from __future__ import annotations

import pytest

from coordinator.keys import PoolKeys
from coordinator.signature import flattener, lua_locals, read_signature

KEYS = PoolKeys("m")
HEADER = """-- Does this and that.
--
-- KEYS
--   hash    replicas, flight:<gateway>
--   zset    held:<replica>: by last use
--   hash    own:<key>[own_count]: shallow to deep
--   string  chunks...
-- ARGV
--   text    replica
--   number  own_count, kept_count
--   flag    leaving: for good;
--             and only then
--   text    kept[kept_count]
--   text    settled(event, reservation)...: pairs
-- Returns nothing.
"""


def made(*lines: str) -> str:
    return "\n".join(["-- KEYS", "--   hash    replicas", "-- ARGV", *lines, ""])


def test_locals_name_every_declared_value_in_one_line() -> None:
    assert lua_locals(read_signature("it", HEADER)) == (
        "local replicas_key, flight_key, held_key, replica, own_count, kept_count, leaving = "
        "KEYS[1], KEYS[2], KEYS[3], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1' "
        "local OWN_OFFSET = 3 local CHUNKS_OFFSET = OWN_OFFSET + own_count "
        "local KEPT_OFFSET = 4 local SETTLED_OFFSET = KEPT_OFFSET + kept_count local SETTLED_SIZE = 2"
    )


def test_arguments_by_name_become_numkeys_keys_and_args_in_the_declared_order() -> None:
    operands = flattener(read_signature("it", HEADER))
    assert operands(
        KEYS,
        settled=[("done", "a"), ("first_token", "b")],
        kept={"x"},
        leaving=True,
        chunks=["c"],
        keys=["k1", "k2"],
        replica="r0",
        gateway="gw0",
    ) == (
        *(6, "kvgate:{m}:replicas", "kvgate:{m}:flight:gw0", "kvgate:{m}:held:r0"),
        *("kvgate:{m}:own:k1", "kvgate:{m}:own:k2", "c"),
        *("r0", 2, 1, 1, "x", "done", "a", "first_token", "b"),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--   float   share", "cannot read the header at float share"),
        ("--   text    a b", "cannot read the header at text a b"),
    ],
)
def test_a_header_that_cannot_be_kept_is_refused_when_the_script_is_loaded(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"it\.lua: {message}"):
        read_signature("it", made(line))


def test_a_line_outside_of_keys_and_argv_is_refused() -> None:
    with pytest.raises(ValueError, match=r"it\.lua: --   hash    replicas is under no section"):
        read_signature("it", made().removeprefix("-- KEYS\n"))
