"""Prompts without messages: completions, embeddings, rerank and score."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.prompt import Prompt, PromptLimits, read_prompt

SYSTEM = {"role": "system", "content": "be brief"}
HELLO = {"role": "user", "content": "hello"}


def read(path: str, body: dict[str, Any]) -> Prompt:
    body = {"model": "m", **body}
    return read_prompt(path, body, root_model="base", adapter=None, cache_salt=None, limits=PromptLimits(10**8))


def test_a_completion_of_several_prompts_is_the_chain_of_the_first() -> None:
    keys = read("/v1/completions", {"prompt": "a" * 600}).keys
    assert read("/v1/completions", {"prompt": ["a" * 600, "b"]}).keys == keys
    assert read("/tokenize", {"prompt": "a" * 600}).keys == keys
    ids = list(range(600))
    assert read("/v1/completions", {"prompt": [ids, [1]]}).keys == read("/v1/completions", {"prompt": ids}).keys


def test_token_ids_have_boundaries_by_bytes() -> None:
    ids = [2**31 - 1, 255, 0, 65535] * 100
    prompt, longer = (read("/v1/completions", {"prompt": prompt}) for prompt in (ids, [*ids, 7]))
    assert prompt.text_bytes == [256, 512, 768, 1024, 1280, 1536, 1600]
    assert prompt.keys[:6] == longer.keys[:6]
    assert prompt.keys[6] != longer.keys[6]
    assert not set(prompt.keys) & set(read("/v1/completions", {"prompt": "a" * 1600}).keys)


def test_a_completion_shares_its_affinity_by_its_first_two_kilobytes() -> None:
    shared = "a" * 2048
    one, other = (read("/v1/completions", {"prompt": shared + end}) for end in "bc")
    assert one.affinity == other.affinity != read("/v1/completions", {"prompt": "b"}).affinity


def test_prompt_embeds_stand_for_a_prompt() -> None:
    one, other = (read("/v1/completions", {"prompt_embeds": data}) for data in ("AAAA", "AAAB"))
    assert one.images == [None]
    assert one.keys != other.keys


def test_special_tokens_are_the_default_of_completions_only() -> None:
    plain = read("/v1/completions", {"prompt": "a"})
    assert read("/v1/completions", {"prompt": "a", "add_special_tokens": True}).keys == plain.keys
    assert read("/v1/completions", {"prompt": "a", "add_special_tokens": False}).keys != plain.keys
    chat = read("/v1/chat/completions", {"messages": [HELLO]})
    assert read("/v1/chat/completions", {"messages": [HELLO], "add_special_tokens": False}).keys == chat.keys
    assert read("/v1/chat/completions", {"messages": [HELLO], "add_special_tokens": True}).keys != chat.keys


@pytest.mark.parametrize(
    "body", [{"messages": [HELLO]}, {"messages": [[HELLO], [SYSTEM]]}, {"input": [HELLO]}, {"input": [[HELLO]]}]
)
def test_an_embedding_of_messages_is_the_chain_of_its_first_conversation(body: dict[str, Any]) -> None:
    prompt = read("/v1/embeddings", body)
    assert prompt.keys == read("/v1/embeddings", {"messages": [HELLO]}).keys
    assert prompt.keys != read("/v1/chat/completions", {"messages": [HELLO]}).keys


def test_an_embedding_of_text_is_read_like_a_completion() -> None:
    prompt = read("/v1/embeddings", {"input": ["a" * 300, "b"]})
    assert prompt.text_bytes == [256, 300]
    assert prompt.keys != read("/v1/completions", {"prompt": "a" * 300}).keys


def test_rerank_and_score_are_the_query_then_the_documents() -> None:
    ranked = read("/v1/rerank", {"query": "q", "documents": ["a", "b"]})
    assert ranked.text_bytes == [1, 2, 3]
    assert read("/rerank", {"query": "q", "documents": ["a", "c"]}).keys[:2] == ranked.keys[:2]
    for names in (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items")):
        body = dict(zip(names, ("q", ["a", "b"]), strict=True))
        assert read("/v1/score", body).keys == read("/score", body).keys == ranked.keys
    assert read("/v1/score", {"text_1": ["q", "a"], "text_2": "b"}).keys[-1] != ranked.keys[-1]
    assert read("/v1/rerank", {"query": "q", "documents": ["a", "b"], "instruction": "i"}).keys != ranked.keys


def test_many_documents_keep_the_querys_key() -> None:
    one, other = (read("/rerank", {"query": "q", "documents": [str(n) for n in range(m)]}) for m in (50, 60))
    assert one.keys[0] == other.keys[0]
    assert len(one.keys) == 17


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/completions", "prompt", {"prompt": 5}),
        ("/v1/completions", "prompt", {"prompt": [1, -1]}),
        ("/v1/completions", "prompt", {"prompt": [2**64]}),
        ("/v1/completions", "prompt[0]", {"prompt": [["a"]]}),
        ("/v1/completions", "prompt[0]", {"prompt": ["\ud800"]}),
        ("/tokenize", "messages", {"messages": 5, "prompt": "a"}),
        ("/v1/embeddings", "messages", {"messages": 5}),
        ("/v1/embeddings", "input[0].role", {"input": [{"content": "a"}]}),
        ("/v1/embeddings", "messages[0][0].content", {"messages": [[{"role": "user", "content": 5}]]}),
        ("/v1/rerank", "documents[1]", {"query": "a", "documents": ["a", 5]}),
        ("/v1/score", "text_2.content", {"text_1": "a", "text_2": {}}),
        ("/v1/score", "text_1[0].content[0].type", {"text_1": [{"content": [{}]}], "text_2": "a"}),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_type_is_refused_by_the_name_the_client_gave_it(
    path: str, param: str, body: dict[str, Any]
) -> None:
    with pytest.raises(ApiError) as refused:
        read(path, body)
    assert (refused.value.status, refused.value.param) == (400, param)
