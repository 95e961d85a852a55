from __future__ import annotations

from tests.gateway.simulator.conftest import RunningReplica


async def test_a_list_of_prompts_gets_a_choice_each_as_they_would_alone(replica: RunningReplica) -> None:
    alone = [await replica.openai.completions.create(model="sim", prompt=prompt, max_tokens=4) for prompt in ("a", "b")]
    both = await replica.openai.completions.create(model="sim", prompt=["a", "b"], max_tokens=4)
    assert [choice.text for choice in both.choices] == [answer.choices[0].text for answer in alone]
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.usage is not None
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (2, 8)


async def test_text_and_its_token_ids_are_one_prompt(replica: RunningReplica) -> None:
    text = "some words " * 20
    _, tokenized = await replica.post("/tokenize", {"model": "sim", "prompt": text})
    _, detokenized = await replica.post("/detokenize", {"model": "sim", "tokens": tokenized["tokens"]})
    assert detokenized == {"prompt": text}
    ids: list[int] = tokenized["tokens"]
    answers = [
        (await replica.openai.completions.create(model="sim", prompt=prompt)).choices[0].text
        for prompt in (text, ids, [ids])
    ]
    assert len(set(answers)) == 1


async def test_token_ids_are_returned_with_each_choice_where_they_are_asked_for(replica: RunningReplica) -> None:
    request = {"model": "sim", "prompt": [[1, 2], [3]], "max_tokens": 3}
    _, answer = await replica.post("/v1/completions", {**request, "return_token_ids": True})
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[1, 2], [3]]
    for choice in answer["choices"]:
        _, text = await replica.post("/detokenize", {"model": "sim", "tokens": choice["token_ids"]})
        assert text["prompt"] == choice["text"]
    _, plain = await replica.post("/v1/completions", request)
    assert {(choice["token_ids"], choice["prompt_token_ids"]) for choice in plain["choices"]} == {(None, None)}


async def test_an_answer_goes_on_in_the_same_words_if_its_beginning_is_a_part_of_the_prompt(
    replica: RunningReplica,
) -> None:
    asked = {"model": "sim", "prompt": "some words ", "max_tokens": 20, "return_token_ids": True}
    _, whole = await replica.post("/v1/completions", asked)
    (choice,) = whole["choices"]
    begun = [*choice["prompt_token_ids"], *choice["token_ids"][:7]]
    _, rest = await replica.post("/v1/completions", {**asked, "prompt": begun, "max_tokens": 13})
    assert rest["choices"][0]["token_ids"] == choice["token_ids"][7:]


async def test_a_chat_goes_on_in_the_same_words(replica: RunningReplica) -> None:
    asked = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
    _, whole = await replica.post("/v1/chat/completions", asked)
    text = whole["choices"][0]["message"]["content"]
    more = [*asked["messages"], {"role": "assistant", "content": text[: 4 * 7]}]
    going_on = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 13}
    _, rest = await replica.post("/v1/chat/completions", {**asked, "messages": more, **going_on})
    assert rest["choices"][0]["message"]["content"] == text[4 * 7 :]
