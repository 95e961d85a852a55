"""Damaged requests are answered, never with a 5xx. (gateway/prompt/test_prompt_fuzz.py reads arbitrary JSON.)"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.api.stage import Stage, chat_body
from tests.gateway.simulator.pictures import data_url

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages"]

MUTATIONS = 800

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


@pytest.mark.parametrize("seed", [1, 2])
def test_a_request_with_anything_wrong_in_it_is_answered(stage: Stage, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(MUTATIONS // 2):
        body = mutated(rng, json.loads(json.dumps(SEED)))
        content = json.dumps(body).encode()
        if rng.random() < 0.3:
            at = rng.randrange(len(content))
            content = content[:at] + rng.randbytes(rng.randrange(3)) + content[at + rng.randrange(3) :]
        check(stage, rng.choice(PATHS), content)


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
