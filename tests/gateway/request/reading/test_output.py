"""The most that an engine generates for a request, by the fields that vLLM's endpoint reads."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from gateway.endpoints import endpoint_of
from gateway.request.reading.output import output_of

CHAT, COMPLETION, BATCH = "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/batch"
RESPONSE, MESSAGE = "/v1/responses", "/v1/messages"
OTHERS = {"max_output_tokens": 1, "max_tokens": 2, "max_completion_tokens": 3}


@pytest.mark.parametrize(
    ("path", "body", "output"),
    [
        (CHAT, {"max_completion_tokens": 900, "max_tokens": 1, "max_output_tokens": 1}, (1, 900)),
        (CHAT, {"max_completion_tokens": None, "max_tokens": 700}, (1, 700)),
        (CHAT, {"max_completion_tokens": 0, "max_tokens": 700}, (1, 700)),
        (CHAT, {"max_output_tokens": 1}, (1, None)),
        (CHAT, {"max_tokens": 100, "n": 16}, (16, 1600)),
        (CHAT, {"max_tokens": 100, "n": None}, (1, 100)),
        (CHAT, {"max_tokens": 100, "n": 0}, (1, 100)),
        (CHAT, {"max_tokens": 100, "n": -3}, (1, 100)),
        (CHAT, {"max_tokens": -5}, (1, None)),
        (CHAT, {"max_tokens": 10**18}, (1, None)),
        (CHAT, {"max_tokens": [5]}, (1, None)),
        (COMPLETION, {"prompt": "x", "max_completion_tokens": 1, "max_tokens": 900}, (1, 900)),
        (COMPLETION, {"prompt": "x"}, (1, 16)),
        (COMPLETION, {"prompt": "x", "max_tokens": None}, (1, None)),
        (COMPLETION, {"prompt": "x", "max_tokens": 0, "echo": True}, (1, 1)),
        (COMPLETION, {"prompt": ["x", "y", "z"], "max_tokens": 10, "n": 2}, (6, 60)),
        (COMPLETION, {"prompt": [[1, 2], [3]], "max_tokens": 10}, (2, 20)),
        (COMPLETION, {"prompt": [1, 2, 3], "max_tokens": 10}, (1, 10)),
        (COMPLETION, {"prompt": "x", "prompt_embeds": ["a", "b"], "max_tokens": 10}, (3, 30)),
        (BATCH, {"messages": [[{}], [{}], [{}]], "max_tokens": 1, "max_completion_tokens": 50}, (3, 150)),
        (RESPONSE, {"max_output_tokens": 900, "max_tokens": 1, "n": 4}, (1, 900)),
        (RESPONSE, {"max_output_tokens": 9, "tools": [{"type": "function"}]}, (1, 9)),
        (RESPONSE, {"max_output_tokens": 9, "tools": [{"type": "mcp"}]}, (1, None)),
        (MESSAGE, {"max_tokens": 900, "max_output_tokens": 1, "max_completion_tokens": 1, "n": 4}, (1, 900)),
        ("/v1/audio/transcriptions", {"max_tokens": 1}, (1, None)),
        ("/v1/embeddings", {"input": "x", **OTHERS}, (1, 0)),
        ("/pooling", OTHERS, (1, 0)),
        ("/v1/somebodys/own", OTHERS, (1, None)),
    ],
)
def test_the_limit_of_an_answer_is_that_of_the_field_which_its_endpoint_reads(
    path: str, body: dict[str, Any], output: tuple[int, int | None]
) -> None:
    assert output_of(endpoint_of(path), body) == output


@pytest.mark.parametrize("value", ["5", " 5 ", "+5", "5.0", "5.00", "1_000", 5.0, 5.5, True, "x", "", "5.1", [], {}])
def test_numbers_are_read_as_vllms_pydantic_reads_them(value: Any) -> None:
    try:
        number = TypeAdapter(int).validate_python(value)
    except ValidationError:
        number = None
    assert output_of(endpoint_of(CHAT), {"max_tokens": value}) == (1, number)
    assert output_of(endpoint_of(CHAT), {"max_tokens": 7, "n": value})[0] == (number or 1)
