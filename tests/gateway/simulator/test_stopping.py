"""Stop strings and stop tokens. The expected answers were seen on vLLM 0.32."""

from __future__ import annotations

from typing import Any

from tests.gateway.simulator.conftest import RunningReplica

_QUESTION: list[Any] = [{"role": "user", "content": "Tell me."}]
_TOKENS = 8


async def words(replica: RunningReplica) -> list[str]:
    """The answer to the question: eight tokens of four characters."""
    chat = await replica.openai.chat.completions.create(model="sim", messages=_QUESTION, max_tokens=_TOKENS)
    text = chat.choices[0].message.content or ""
    return [text[at : at + 4] for at in range(0, len(text), 4)]


async def test_an_answer_ends_before_its_stop_string(replica: RunningReplica) -> None:
    told = await words(replica)
    stop = told[2][1:] + told[3][:2]  # the stop string begins in the third token and ends in the fourth
    expected = "".join(told)[: 4 * 2 + 1]
    create = replica.openai.chat.completions.create
    for given, in_output in ((stop, False), (["never", stop], False), ([stop, "never"], True)):
        body = {"include_stop_str_in_output": in_output}
        text = expected + stop if in_output else expected
        chat = await create(model="sim", messages=_QUESTION, max_tokens=_TOKENS, stop=given, extra_body=body)
        choice: Any = chat.choices[0]
        assert (choice.message.content, choice.finish_reason, choice.stop_reason) == (text, "stop", stop)
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 4

        chunks = await create(
            model="sim", messages=_QUESTION, max_tokens=_TOKENS, stop=given, stream=True, extra_body=body
        )
        streamed: list[Any] = [chunk.choices[0] async for chunk in chunks]
        assert "".join(each.delta.content or "" for each in streamed) == text
        assert [each.finish_reason for each in streamed] == [None] * 4 + ["stop"]
        assert streamed[-1].stop_reason == stop


async def test_a_stream_holds_back_what_may_become_a_stop_string(replica: RunningReplica) -> None:
    told = await words(replica)
    stop = "n" * 10  # the stream holds back nine characters
    chunks = await replica.openai.chat.completions.create(
        model="sim", messages=_QUESTION, max_tokens=_TOKENS, stop=stop, stream=True
    )
    deltas = [chunk.choices[0].delta.content or "" async for chunk in chunks][1:]
    text = "".join(told)
    assert deltas == ["", "", text[:3], text[3:7], text[7:11], text[11:15], text[15:19], text[19:]]


async def test_a_stop_token_ends_an_answer_and_min_tokens_puts_it_off(replica: RunningReplica) -> None:
    told = await words(replica)
    plain = await replica.chat("Tell me.", max_tokens=_TOKENS, return_token_ids=True)
    third = plain["choices"][0]["token_ids"][2]
    stopped = await replica.chat("Tell me.", max_tokens=_TOKENS, stop_token_ids=[third])
    (choice,) = stopped["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == (told[0] + told[1], third)
    later = await replica.chat("Tell me.", max_tokens=_TOKENS, stop=told[2], stop_token_ids=[third], min_tokens=3)
    assert later["choices"][0]["message"]["content"] == "".join(told)
    assert later["choices"][0]["finish_reason"] == "length"
