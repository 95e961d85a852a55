"""The other APIs of the official SDK: completions, embeddings, models, and the errors it raises."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.api.stage import Stage, text, user


@pytest.mark.parametrize("prompt", [text(500), [text(500), text(300)], list(range(1, 200)), [[1, 2, 3], [4, 5]]])
def test_prompts_of_every_kind_are_completed(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model="sim", prompt=prompt, max_tokens=4)
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert len(answer.choices) == (len(prompt) if several else 1)
    assert all(choice.text for choice in answer.choices)


def test_a_streamed_completion_shows_the_usage_that_was_asked_for(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="sim", prompt=text(100), max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    *_, last = stream
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 3


@pytest.mark.parametrize("given", [text(300), [text(300), text(200)], [1, 2, 3]])
def test_embeddings_are_computed(client: openai.OpenAI, given: Any) -> None:
    answer = client.embeddings.create(model="sim", input=given)
    assert len(answer.data) == (2 if isinstance(given, list) and isinstance(given[0], str) else 1)
    assert len(answer.data[0].embedding) == 64


def test_models_are_listed_once_and_retrieved_by_name(client: openai.OpenAI, mixed: Stage) -> None:
    assert [model.id for model in client.models.list()] == ["sim"]
    assert client.models.retrieve("sim").owned_by == "vllm"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("org/unknown")
    assert unknown.value.code == "model_not_found"
    cards = {card["id"]: card for card in mixed.get("/v1/models").json()["data"]}
    assert list(cards) == ["a", "b", "slow", "a-french"], "adapters are the last: clients take the first of the list"
    assert cards["a-french"]["parent"] == "a"


@pytest.mark.parametrize(
    ("fields", "raised", "code", "param"),
    [
        ({"model": "nonesuch"}, openai.NotFoundError, "model_not_found", "model"),
        ({"messages": "hello"}, openai.BadRequestError, "invalid_value", "messages"),
        (
            {"messages": user([{"type": "image_url", "image_url": {"url": "ftp://x/y.png"}}])},
            openai.BadRequestError,
            "invalid_value",
            "messages[0].content[0].image_url.url",
        ),
    ],
)
def test_the_sdk_raises_the_right_class_with_code_and_param(
    client: openai.OpenAI, fields: dict[str, Any], raised: type[openai.APIStatusError], code: str, param: str
) -> None:
    with pytest.raises(raised) as refused:
        client.chat.completions.create(**{"model": "sim", "messages": user("x"), **fields})
    assert (refused.value.code, refused.value.param) == (code, param)
    assert refused.value.message


def test_a_replicas_own_refusal_passes_through(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="sim", messages=user(text(100)), max_tokens=-1)
    body: Any = refused.value.body
    assert body == {
        "message": "max_tokens must be from 1 to 131072, got -1",
        "type": "BadRequestError",
        "param": "max_tokens",
        "code": 400,
    }


def test_an_adapter_is_served_by_the_replicas_that_have_it(mixed: Stage) -> None:
    for _ in range(6):
        assert mixed.chat(text(300), model="a-french").replica == "m1"
    assert {mixed.chat(text(3000), model="a").replica for _ in range(6)} == {"m0", "m1"}
    assert mixed.chat(text(300), model="b").replica == "m2"
