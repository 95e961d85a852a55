"""Requests of arbitrary JSON are always answered, and never with a 5xx."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.stage import Stage, chat_body
from tests.gateway.simulator.pictures import data_url

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize"]
PATHS += ["/v1/rerank", "/v1/score", "/v1/nonesuch", "/v1/route/explain"]
MUTATIONS = 1500

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "model messages prompt input tools tool_choice stream stream_options cache_salt system max_tokens n session_id "
    "previous_response_id query documents text_1 reasoning instructions"
)
fields = st.sampled_from(FIELDS.split())
SEED: dict[str, Any] = chat_body(
    [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": data_url(80), "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
    stream=True,
    stream_options={"include_usage": True},
    tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    cache_salt="salt",
    temperature=0.5,
    stop=["x"],
    documents=[{"title": "a"}],
)
SEED["messages"] += [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
]
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    0.5,
    "",
    "x",
    "\x00",
    "\U0001f600",
    [],
    [None],
    {},
    {"type": None},
    {"url": 5},
]


def check(stage: Stage, path: str, body: bytes) -> None:
    answer = stage.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code < 500, (path, body[:500], answer.text[:500])
    if answer.status_code >= 400 and not answer.headers.get("x-kvgate-replica"):
        assert answer.json()["error"]["code"], answer.text


@settings(max_examples=700, database=None)
@given(path=st.sampled_from(PATHS), body=st.dictionaries(fields, anything, max_size=5))
def test_any_fields_of_any_type_are_answered(stage: Stage, path: str, body: dict[str, Any]) -> None:
    content = json.dumps({"model": "sim", **body}, ensure_ascii=False)
    check(stage, path, content.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_request_with_anything_wrong_in_it_is_answered(stage: Stage, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(MUTATIONS // 2):
        body = mutated(rng, json.loads(json.dumps(SEED)))
        content = json.dumps(body).encode()
        if rng.random() < 0.3:
            at = rng.randrange(len(content))
            content = content[:at] + rng.randbytes(rng.randrange(3)) + content[at + rng.randrange(3) :]
        check(stage, rng.choice(PATHS[:3]), content)


def mutated(rng: random.Random, value: Any) -> Any:
    """The value with one of its parts replaced, removed or renamed."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if rng.random() < 0.15:
            value.pop(key)
        else:
            value[key] = mutated(rng, value[key])
        return value
    return rng.choice(ODD)
