"""Log probabilities, whole and streamed, as the official client reads them."""

from __future__ import annotations

import math
from typing import Any

from tests.gateway.simulator.conftest import RunningReplica

_QUESTION: list[Any] = [{"role": "user", "content": "Tell me."}]


async def test_each_token_of_a_chat_answer_has_its_log_probability(replica: RunningReplica) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 5, "n": 2}
    create = replica.openai.chat.completions.create
    chat = await create(model="sim", messages=_QUESTION, **asked)
    streamed: list[list[Any]] = [[], []]
    async for chunk in await create(model="sim", messages=_QUESTION, stream=True, **asked):
        (choice,) = chunk.choices
        if choice.logprobs is not None:
            streamed[choice.index] += choice.logprobs.content or []
    for index, choice in enumerate(chat.choices):
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert content == streamed[index]
        assert len(content) == 5
        assert "".join(each.token for each in content) == choice.message.content
        for each in content:
            assert bytes(each.bytes or []) == each.token.encode()
            assert each.top_logprobs[0].model_dump() == each.model_dump(exclude={"top_logprobs"})
            tokens = [top.token for top in each.top_logprobs]
            logprobs = [top.logprob for top in each.top_logprobs]
            assert len(set(tokens)) == 3
            assert sum(map(math.exp, logprobs)) <= 1


async def test_a_completion_echoes_its_prompt_with_its_log_probabilities(replica: RunningReplica) -> None:
    prompts = ["hello there", "ä b"]
    body = {"model": "sim", "prompt": prompts, "max_tokens": 2, "echo": True, "logprobs": 1}
    _, whole = await replica.post("/v1/completions", body)
    choices = whole["choices"]
    alone = [await replica.openai.completions.create(model="sim", prompt=each, max_tokens=2) for each in prompts]
    for choice, prompt, answer in zip(choices, prompts, alone, strict=True):
        assert choice["text"] == prompt + answer.choices[0].text
        told = choice["logprobs"]
        tokens = told["tokens"]
        assert "".join(tokens) == choice["text"]
        assert told["text_offset"] == [len("".join(tokens[:at])) for at in range(len(tokens))]
        assert [each is None for each in told["token_logprobs"]] == [True] + [False] * (len(tokens) - 1)

    streamed: list[Any] = [{"text": "", "logprobs": {name: [] for name in choice["logprobs"]}} for choice in choices]
    for chunk in await replica.chunks("/v1/completions", body):
        (piece,) = chunk["choices"]
        choice = streamed[piece["index"]]
        choice["text"] += piece["text"]
        for name, values in piece["logprobs"].items():
            choice["logprobs"][name] += values
    assert streamed == [{"text": choice["text"], "logprobs": choice["logprobs"]} for choice in choices]
