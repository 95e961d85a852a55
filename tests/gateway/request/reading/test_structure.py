"""The values of a JSON text are counted without parsing it. A parser finds the same number in any spelling."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.request.reading import structure
from gateway.request.reading.structure import check_structure, is_sparse

texts = st.text(st.sampled_from('ab"\\{}[],: \né'), max_size=6)
documents = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int]:
    """The number of fields, the number of values in lists and objects (an empty one counts as one), and the nesting."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    fields = len(value) if isinstance(value, dict) else 0
    return (
        fields + sum(one[0] for one in inner),
        max(1, len(value)) + sum(one[1] for one in inner),
        1 + max((one[2] for one in inner), default=0),
    )


def is_refused(body: bytes, **limits: int) -> bool:
    """Whether a limit is exceeded. The error then says what is limited."""
    refused: ApiError | None = None
    try:
        with pytest.MonkeyPatch.context() as patched:
            for name, limit in limits.items():
                patched.setattr(structure, name.upper(), limit)
            check_structure(body)
    except ApiError as error:
        refused = error
    if refused is None:
        return False
    assert (refused.status, refused.code, refused.param) == (400, "limit_exceeded", "body")
    words = {"max_fields": "fields", "max_elements": "values", "max_nesting": "nested"}
    assert all(words[name] in refused.message for name in limits)
    return True


@given(documents, st.integers(1, 40), st.booleans())
@example(["\\"], 1, False)
@example({'"': {"\\\\": "}"}}, 3, True)
def test_the_counts_are_a_parsers_wherever_the_text_is_cut(value: Any, slice_bytes: int, is_ascii: bool) -> None:
    body = json.dumps([value], ensure_ascii=is_ascii, indent=1 if is_ascii else None).encode()
    fields, elements, nesting = counted([value])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(structure, "_SLICE_BYTES", slice_bytes)
        for name, count in (("max_fields", fields), ("max_elements", elements), ("max_nesting", nesting)):
            patched.setattr(structure, "_may_exceed", lambda *_: True)
            assert not is_refused(body, **{name: count})
            assert count == 0 or is_refused(body, **{name: count - 1})


@pytest.mark.parametrize(
    ("body", "limits"),
    [
        (b"[" * 200 + b"]" * 200, {"max_nesting": 128}),
        (b'{"a":' * 200 + b"1" + b"}" * 200, {"max_nesting": 128}),
        (b'{"messages":[' + b"{}," * 3000 + b"{}]}", {"max_elements": 2000}),
        (orjson.dumps({f"field {number}": 1 for number in range(3000)}), {"max_fields": 2000}),
    ],
)
def test_what_exceeds_a_limit_is_found_worth_counting(body: bytes, limits: dict[str, int]) -> None:
    assert is_refused(body, **limits)


def test_a_text_in_a_string_is_no_structure() -> None:
    body = orjson.dumps({"messages": [{"role": "user", "content": '{"a":[{},{}],' * 100_000}]})
    assert not is_refused(body, max_fields=8)
    assert not is_refused(body, max_elements=8)
    assert not is_refused(body, max_nesting=8)


def test_an_image_is_sparse_and_a_list_of_numbers_is_not() -> None:
    image = orjson.dumps({"messages": [{"role": "user", "content": [{"image_url": {"url": "data:," + "A" * 10**6}}]}]})
    assert is_sparse(image)
    assert not is_sparse(orjson.dumps({"prompt": list(range(5000))}))
    assert not is_sparse(b'{"input":[' + b"[]," * 5000 + b"[]]}")
