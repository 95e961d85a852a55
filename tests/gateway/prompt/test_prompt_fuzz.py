"""Any JSON from a client leads to a prompt or to a 400. Nothing else is raised."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.prompt import PromptLimits, read_prompt

ROOT_FIELDS = {
    "model": "m",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}, {"name": "g", "input_schema": {}}],
    "tool_choice": "auto",
    "chat_template_kwargs": {"a": 1},
    "documents": [{"text": "a"}],
    "reasoning_effort": "low",
    "add_special_tokens": True,
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = [
    {"type": "text", "text": "a"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}, "uuid": "x"},
    {"type": "input_audio", "input_audio": {"data": "AAAA"}},
    {"type": "video_url", "video_url": {"url": "http://x/a"}},
]
MESSAGES = [
    {"role": "system", "content": "x-anthropic-billing-header: a\nb"},
    {"role": "user", "content": PARTS, "name": "n"},
    {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "a"},
]
BLOCKS = [
    {"type": "text", "text": "a"},
    {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
    {"type": "image", "source": {"type": "url", "url": "http://x/a"}},
    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}]},
    {"type": "thinking", "thinking": "a"},
    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "summary": [{"text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "a"},
    {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "a"},
    {"type": "web_search_call", "id": "a"},
]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/tokenize": {"prompt": "a"},
    "/v1/completions": {"prompt": [[1, 2, 3]], "prompt_embeds": None},
    "/v1/embeddings": {"input": ["a"], "messages": None},
    "/v1/responses": {"instructions": "a", "input": ITEMS, "reasoning": {"effort": "low"}},
    "/v1/messages": {
        "system": [{"type": "text", "text": "a"}],
        "messages": [{"role": "user", "content": BLOCKS}, {"role": "system", "content": "a"}],
        "thinking": {"type": "enabled"},
    },
    "/v1/rerank": {"query": "a", "documents": ["a", {"content": PARTS}]},
    "/v1/score": {"text_1": ["a"], "text_2": {"content": PARTS}},
    "/v1/unknown": {"messages": MESSAGES},
}

any_text = st.one_of(
    st.text(st.characters(), max_size=8),  # includes lone surrogates
    st.sampled_from(["", "system", "assistant", "text", "image_url", "uuid", "url", "\ud800", "[1]", "1e999"]),
    st.sampled_from(["data:image/png;base64,AA==", "data:,", "http://[", "https://x", "file:///x", "%"]),
)
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every position in a JSON value where another value could be."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, child in children:
        found += places(child, (*path, key))
    return found


def read_or_refuse(path: str, body: dict[str, Any]) -> None:
    limits = PromptLimits(10**8, image_hosts=("x",))
    try:
        prompt = read_prompt(path, body, root_model="base", adapter="a", cache_salt="s", limits=limits)
    except ApiError as error:
        refusal = error
    else:
        assert len(prompt.affinity) == 16
        assert len(prompt.keys) == len(prompt.text_bytes) == len(prompt.image_counts)
        return
    assert refusal.status == 400
    assert refusal.param


@pytest.mark.parametrize("path", REQUESTS)
@settings(max_examples=150)
@given(data=st.data())
def test_a_request_with_any_value_anywhere_is_read_or_refused(path: str, data: st.DataObject) -> None:
    body = copy.deepcopy(ROOT_FIELDS | REQUESTS[path])
    for _ in range(data.draw(st.integers(1, 2))):
        *parents, last = data.draw(st.sampled_from(places(body)))
        holder: Any = body
        for key in parents:
            holder = holder[key]
        if isinstance(holder, dict) and data.draw(st.booleans()):
            holder[data.draw(any_text)] = data.draw(any_json)
        else:
            holder[last] = data.draw(any_json)
    read_or_refuse(path, body)


@pytest.mark.parametrize("path", REQUESTS)
@settings(max_examples=50)
@given(value=any_json)
def test_a_body_with_any_value_for_its_prompt_is_read_or_refused(path: str, value: Any) -> None:
    for field in REQUESTS[path]:
        read_or_refuse(path, {"model": "m", **REQUESTS[path], field: copy.deepcopy(value)})
