from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from gateway.simulator.answers import text_answer
from gateway.simulator.chat_template import render_chat
from gateway.simulator.images import Image, ImageReader
from gateway.simulator.prompt import (
    BlockHasher,
    EnginePrompt,
    PromptBuilder,
    extra_keys,
    token_ids,
    token_of,
    token_text,
)
from tests.gateway.simulator.pictures import image_part

_BLOCK_SIZE = 4
_turn = st.lists(st.one_of(st.text(max_size=20), st.integers(0, 3).map(image_part)), min_size=1, max_size=3).map(
    lambda parts: [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
)


def hashes(prompt: EnginePrompt) -> list[int]:
    hasher = BlockHasher(prompt, _BLOCK_SIZE)
    hasher.extend(prompt.tokens)
    return hasher.hashes


@settings(max_examples=50)
@given(turns=st.lists(_turn, min_size=1, max_size=3), answer=st.text(max_size=20))
def test_the_next_turn_of_a_conversation_starts_with_the_tokens_and_blocks_of_this_one(
    turns: list[list[object]], answer: str
) -> None:
    reader = ImageReader()
    messages: list[object] = []
    previous: EnginePrompt | None = None
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = render_chat(messages, reader)
        if previous is not None:
            assert prompt.tokens.startswith(previous.tokens)
            assert hashes(prompt)[: len(hashes(previous))] == hashes(previous)
        messages.append({"role": "assistant", "content": answer})
        previous = prompt


def test_an_answer_sent_back_has_the_tokens_that_were_generated() -> None:
    question = [{"role": "user", "content": "why?"}]
    prompt = render_chat(question, ImageReader())
    pieces = text_answer(prompt, 5).pieces
    messages = [*question, {"role": "assistant", "content": "".join(pieces)}]
    assert render_chat(messages, ImageReader()).tokens.startswith(prompt.tokens + b"".join(map(token_of, pieces)))


@given(left=st.text(max_size=12), right=st.text(max_size=12))
def test_texts_that_differ_have_different_tokens(left: str, right: str) -> None:
    prompts = []
    for text in (left, right):
        builder = PromptBuilder()
        builder.text(text)
        prompts.append(builder.build())
    assert (prompts[0].tokens == prompts[1].tokens) == (left == right)
    assert token_text(token_ids(prompts[0].tokens)) == left


def test_an_image_enters_the_keys_of_the_blocks_it_touches_with_its_offset_from_their_start() -> None:
    builder = PromptBuilder()
    builder.text("x" * 3 * 4)
    builder.image(Image("u-1", "content", 7))
    prompt = builder.build(cache_salt="tenant")
    assert extra_keys(prompt, _BLOCK_SIZE) == {
        0: (("u-1", 3), "tenant"),
        1: (("u-1", -1),),
        2: (("u-1", -5),),
    }


def test_salt_adapter_and_image_each_change_every_hash_from_the_first_block_on() -> None:
    def prompt(identity: str = "a", lora: str | None = None, salt: str | None = None) -> EnginePrompt:
        builder = PromptBuilder()
        builder.image(Image(identity, "content", 16))
        return builder.build(lora, salt)

    variants = [prompt(), prompt("b"), prompt(lora="l"), prompt(salt="s")]
    assert len({block_hash for variant in variants for block_hash in hashes(variant)}) == 4 * 4
