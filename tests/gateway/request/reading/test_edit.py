"""A JSON text is changed where it is meant to be, and nowhere else."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.request.reading.edit import Edit, edited, edits_of, steps_of

SPACES = st.sampled_from(["", " ", "\n\t", "  "])
KEYS = st.sampled_from(["a", "uuid", "b", "session_id", "é"])
STRINGS = st.text(st.sampled_from('ab"\\{}[],:é\U0001f6b2\ud800\n'), max_size=6)
SCALARS = st.one_of(
    STRINGS.map(json.dumps),
    STRINGS.filter(lambda text: "\ud800" not in text).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from(["1", "-0.0", "1E400", "123456789012345678901234567890", "1.10", "true", "null", '"\\u0061\\/"']),
)


def spelled(key: str, has_escape: bool) -> str:
    return f'"\\u{ord(key[0]):04x}{key[1:]}"' if has_escape else json.dumps(key, ensure_ascii=False)


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    members = draw(st.lists(st.tuples(KEYS, st.booleans(), values), max_size=4))
    space = draw(SPACES)
    inner = f"{space},{space}".join(f"{spelled(key, escaped)}{space}:{space}{value}" for key, escaped, value in members)
    return f"{{{space}{inner}{space}}}"


@st.composite
def lists(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    space = draw(SPACES)
    return f"[{space}" + f"{space},{space}".join(draw(st.lists(values, max_size=3))) + f"{space}]"


VALUES = st.recursive(SCALARS, lambda values: st.one_of(objects(values), lists(values)), max_leaves=12)


def parts_in(value: Any) -> list[dict[str, Any]]:
    """The objects with a uuid, at any depth."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [
        *([value] if isinstance(value, dict) and "uuid" in value else []),
        *(p for one in inner for p in parts_in(one)),
    ]


@given(objects(VALUES), st.booleans())
def test_a_parser_finds_the_changes_and_nothing_else_changed(text: str, is_dropped: bool) -> None:
    document = json.loads(text, parse_float=str, parse_int=str)
    parts = parts_in(document)
    for part in parts:
        part["uuid"] = "ours"
        if is_dropped:
            del part["uuid"]
    edit = edits_of(document, parts, "uuid")
    edit.cut.add("session_id")
    edit.added["priority"] = 0
    expected = {key: value for key, value in document.items() if key != "session_id"} | {"priority": "0"}
    got = edited(text.encode(), edit)
    assert json.loads(got, parse_float=str, parse_int=str) == expected
    assert not parts or b'"uuid":"ours"' in got or is_dropped or "priority" in expected


def test_what_is_not_meant_stays_to_the_letter() -> None:
    text = (
        b' {"n": 123456789012345678901234567890, "x" : 1.10,"x":2, "session_id":"a", "s\\u0065ssion_id": {"a":[1]},'
        b'\n"m":[ 1E2, {"uuid":"x","k":"\\u00e9\\ud800", "uuid" :"y"} ], "z": "\\/" } '
    )
    document = json.loads(text)
    part = document["m"][1]
    part["uuid"] = "ours"
    edit = edits_of(document, [part], "uuid")
    edit.cut.add("session_id")
    edit.added = {"new": None}
    assert edited(text, edit) == (
        b'{"n": 123456789012345678901234567890,"x" : 1.10,"x":2,"m":[1E2,{"k":"\\u00e9\\ud800","uuid":"ours"}],'
        b'"z": "\\/","new":null}'
    )


def test_an_earlier_duplicate_of_what_is_changed_is_left_out() -> None:
    """A reader that takes the first of them would find in it what was to be removed."""
    text = b'{"m":[{"uuid":"forged"}],"a":1,"m":"x","m":[{"uuid":"forged"}]}'
    document = json.loads(text)
    del document["m"][0]["uuid"]
    assert edited(text, edits_of(document, document["m"], "uuid")) == b'{"a":1,"m":[{}]}'


def test_many_duplicates_of_what_is_changed_take_no_square_of_their_number() -> None:
    """With the square, this takes longer than a test may."""
    duplicates = b'{"":0,' + b'"s":{},' * 200_000 + b'"s":{"a":1}}'
    assert edited(duplicates, Edit(inner={"s": Edit(cut={"a"})})) == b'{"":0,"s":{}}'
    assert steps_of(duplicates) > 20_000


def test_a_long_string_of_escapes_takes_no_memory_of_its_own() -> None:
    text = b'{"p":"' + b"a\\n" * 2**20 + b'\\"","session_id":1}'
    tracemalloc.start()
    assert edited(text, Edit(cut={"session_id"})) == text[: -len(b',"session_id":1}')] + b"}"
    assert tracemalloc.get_traced_memory()[1] < 4 * len(text)
    tracemalloc.stop()


def test_an_empty_object_gets_its_first_member() -> None:
    assert edited(b" { } ", Edit(added={"a": 1})) == b'{"a":1}'
    assert edited(b'{"a":2}', Edit(cut={"a"})) == b"{}"
