"""Where the model of a JSON text is, however the text is written."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.request.paths import with_model_in_query
from gateway.request.reading.model_field import model_span

TEXTS = st.sampled_from(["m", "model", '"model":"m"', '\\"model":"', "{[", "]}", "é", "", '"model', "\\"])
VALUES = st.recursive(
    TEXTS | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def named(text: bytes) -> bytes:
    """The text with another model."""
    begin, end = model_span(text)
    return text[:begin] + b'"other"' + text[end:]


@given(st.dictionaries(TEXTS, VALUES, max_size=5), st.text(max_size=4), st.integers(0, 5), st.booleans())
def test_only_the_model_of_the_whole_text_is_found(
    others: dict[str, Any], model: str, at: int, is_indented: bool
) -> None:
    members = [(key, value) for key, value in others.items() if key != "model"]
    members.insert(at, ("model", model))
    text = orjson.dumps(dict(members), option=orjson.OPT_INDENT_2 if is_indented else 0)
    assert orjson.loads(named(text)) == {**dict(members), "model": "other"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b' {\n"model" :\r\n\t"m" , "n":1.50}\n', b' {\n"model" :\r\n\t"other" , "n":1.50}\n'),
        (rb'{"model":"a\"b\\","n":1}', b'{"model":"other","n":1}'),
        (rb'{"x":{"model":"m"},"mod\u0065l":"m"}', rb'{"x":{"model":"m"},"mod\u0065l":"other"}'),
        (rb'{"\u006D\u006f\u0064\u0065\u006C":"m"}', rb'{"\u006D\u006f\u0064\u0065\u006C":"other"}'),
        (rb'{"model":"m","\"model":"x"}', rb'{"model":"other","\"model":"x"}'),
        (b'{"model":"a","x":[],"model":"b"}', b'{"model":"a","x":[],"model":"other"}'),
        (b'{"x":{"model":{}},"model":"m","y":{"model":"m"}}', b'{"x":{"model":{}},"model":"other","y":{"model":"m"}}'),
    ],
    ids=["spaces", "quotes in it", "escaped key", "all escaped", "longer key", "twice", "inner ones"],
)
def test_every_spelling_is_found_and_all_else_stays(text: bytes, wanted: bytes) -> None:
    assert named(text) == wanted
    assert model_span(bytearray(text)) == model_span(text)


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("/v1/audio/voices?model=m&a=%2F", "/v1/audio/voices?model=org%2Fv2%20%26&a=%2F"),
        ("/v1/any?a=model&mod%65l=m&b=c+d&model=x", "/v1/any?a=model&model=org%2Fv2%20%26&b=c+d&model=org%2Fv2%20%26"),
    ],
)
def test_a_query_gets_the_name_wherever_it_names_a_model(target: str, wanted: str) -> None:
    assert with_model_in_query(target, "org/v2 &") == wanted
