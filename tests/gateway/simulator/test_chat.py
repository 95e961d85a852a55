from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import openai
import pytest
from hypothesis import example, given, settings

from tests.gateway.simulator.conftest import RunningReplica, StartReplica

_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"enum": ["C", "F"]},
                    "days": {"type": "integer"},
                },
            },
        },
    }
]
_QUESTION: list[Any] = [{"role": "user", "content": "What is the weather like?"}]


async def test_equal_prompts_get_equal_answers_on_every_replica(start_replica: StartReplica) -> None:
    one, other = await start_replica(id="r1"), await start_replica(id="r2")
    answers = [
        await replica.openai.chat.completions.create(model="sim", messages=_QUESTION) for replica in (one, one, other)
    ]
    contents = {answer.choices[0].message.content for answer in answers}
    assert len(contents) == 1
    assert answers[0].choices[0].finish_reason == "stop"
    assert answers[0].model == "sim"
    assert answers[0].usage is not None
    assert answers[0].usage.completion_tokens == 16


async def test_a_stream_carries_the_plain_answer_and_usage_only_if_asked(replica: RunningReplica) -> None:
    plain = await replica.openai.chat.completions.create(model="sim", messages=_QUESTION, max_tokens=5)
    for asked in (False, True):
        stream = await replica.openai.chat.completions.create(
            model="sim",
            messages=_QUESTION,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": asked},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == plain.choices[0].message.content
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert reasons == [None] * 5 + ["length"]
        assert [not chunk.choices for chunk in chunks].count(True) == asked
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"include_usage": True, "continuous_usage_stats": True}, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
        ({"continuous_usage_stats": True}, []),
    ],
)
async def test_with_continuous_usage_each_chunk_tells_the_tokens_of_its_choice(
    replica: RunningReplica, options: Any, tokens: list[tuple[int, int]]
) -> None:
    create = replica.openai.chat.completions.create
    ask = {"model": "sim", "messages": _QUESTION, "max_tokens": 2, "n": 2}
    stream = await create(**ask, stream=True, stream_options=options)
    told = [(chunk.choices, chunk.usage) async for chunk in stream]
    assert sorted((choices[0].index, usage.completion_tokens) for choices, usage in told if choices and usage) == tokens
    assert len({usage.total_tokens - usage.completion_tokens for _, usage in told if usage}) == bool(tokens)


async def test_tools_are_rendered_into_the_prompt_whatever_the_tool_choice(replica: RunningReplica) -> None:
    without = await replica.chat("hello")
    with_tools = await replica.chat("hello", tools=_TOOLS)
    none_chosen = await replica.chat("hello", tools=_TOOLS, tool_choice="none")
    assert with_tools["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]
    assert none_chosen["usage"]["prompt_tokens"] == with_tools["usage"]["prompt_tokens"]


async def test_a_streams_usage_has_cached_tokens_only_when_there_are_some(replica: RunningReplica) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "some words " * 100}], "max_tokens": 2}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    streams = []
    for _ in range(2):
        async with replica.http.post("/v1/chat/completions", json=body) as response:
            streams.append(await response.text())
    assert ['"prompt_tokens_details":{"cached_tokens":' in stream for stream in streams] == [False, True]
    assert "prompt_tokens_details" not in streams[0]


async def test_the_next_turn_hits_the_whole_previous_turn_and_its_answer(replica: RunningReplica) -> None:
    messages: list[Any] = [{"role": "user", "content": "some words " * 50}]
    body = {"model": "sim", "messages": messages, "max_tokens": 64}
    _, first = await replica.post("/v1/chat/completions", body)
    messages.append(first["choices"][0]["message"])
    messages.append({"role": "user", "content": "go on"})
    _, second = await replica.post("/v1/chat/completions", body)
    known_tokens = first["usage"]["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known_tokens // 16 * 16


async def test_a_prompt_longer_than_the_cache_is_refused(start_replica: StartReplica) -> None:
    replica = await start_replica(num_gpu_blocks=8)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens"):
        await replica.openai.chat.completions.create(model="sim", messages=[{"role": "user", "content": "x" * 600}])


_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 99), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "image_url", "url", "function", "name"]), inner
        ),
    ),
    max_leaves=8,
)
# fmt: off
_FIELDS = [
    "model", "messages", "prompt", "input", "tools", "tool_choice", "max_tokens", "n", "stream", "stream_options",
    "stop", "stop_sequences", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "text", "response_format",
    "structured_outputs", "cache_salt", "session_id", "vllm_xargs", "chat_template_kwargs", "instructions",
    "previous_response_id", "system", "text_1", "text_2", "query", "documents",
]
_PATHS = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score",
    "/v1/rerank", "/tokenize", "/detokenize", "/sim/fail",
]
# fmt: on


@settings(max_examples=150)
@given(path=st.sampled_from(_PATHS), body=st.dictionaries(st.sampled_from(_FIELDS), _json))
@example(path="/v1/embeddings", body={"tools": [{}]})
async def test_whatever_the_body_holds_the_answer_is_never_a_500(
    replica: RunningReplica, path: str, body: dict[str, Any]
) -> None:
    usual = {"messages": _QUESTION, "prompt": "x", "input": "x", "max_tokens": 2}
    async with replica.http.post(path, json={**usual, **body}) as response:
        assert response.status in (200, 400, 404), await response.text()
        await response.read()


async def test_token_ids_are_returned_where_they_are_asked_for(replica: RunningReplica) -> None:
    answer = await replica.chat("hello", max_tokens=3, return_token_ids=True)
    messages = [{"role": "user", "content": "hello"}]
    _, tokenized = await replica.post("/tokenize", {"model": "sim", "messages": messages})
    assert answer["prompt_token_ids"] == tokenized["tokens"]
    assert len(answer["choices"][0]["token_ids"]) == 3
    plain = await replica.chat("hello", max_tokens=3)
    assert (plain["prompt_token_ids"], plain["choices"][0]["token_ids"]) == (None, None)
