"""A refusal that is one replica's own is no answer, while another replica may serve the request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import orjson
import pytest

from gateway.relay import retry_budget
from gateway.relay.own_refusals import own_refusal
from tests.gateway.scripted import ASKED, CHAT, ScriptedReplica, gateway_before, whole

# The bodies are those of vLLM 0.33: `_check_model`, `_token_len_check` and `validate_num_items`.
UNKNOWN = {"message": "The model `m` does not exist. Valid aliases: base.", "type": "NotFoundError", "param": "model"}
TOO_LONG = {
    "message": "This model's maximum context length is 4096 tokens. However, your prompt contains 5000 input tokens.",
    "type": "BadRequestError",
    "param": "input_tokens",
}
NO_IMAGES = {"message": "At most 0 image(s) may be provided in one prompt.", "type": "BadRequestError", "param": None}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PICTURE = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}],
}


def refused(error: dict[str, Any], status: int) -> bytes:
    return whole(orjson.dumps({"error": {**error, "code": status}}), "connection: close", status=status)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[ScriptedReplica, ScriptedReplica]]:
    one, other = ScriptedReplica(), ScriptedReplica()
    async with one.running(), other.running():
        other.says(whole(b'{"object": "chat.completion"}', "connection: close"))
        yield one, other


async def asked(
    replicas: tuple[ScriptedReplica, ...], times: int, path: str = CHAT, **fields: Any
) -> list[httpx.Response]:
    listed = [{"id": f"r{n}", "url": replica.url} for n, replica in enumerate(replicas)]
    async with AsyncExitStack() as stack:
        _, url = await stack.enter_async_context(gateway_before(replicas[0], replicas=listed))
        http = await stack.enter_async_context(httpx.AsyncClient())
        prompts = ({"messages": [{"role": "user", "content": f"{n} " * 900}]} for n in range(times))
        return [await http.post(url + path, json={**ASKED, **prompt, **fields}) for prompt in prompts]


async def test_a_model_that_one_replica_has_unloaded_is_asked_of_the_others(
    pair: tuple[ScriptedReplica, ScriptedReplica],
) -> None:
    pair[0].says(refused(UNKNOWN, 404))
    assert {answer.status_code for answer in await asked(pair, 16)} == {200}
    assert pair[0].asked, "it was tried"


async def test_a_prompt_that_is_too_long_for_one_replica_goes_to_a_longer_one(
    pair: tuple[ScriptedReplica, ScriptedReplica],
) -> None:
    """The gateway only estimates how many tokens a prompt has."""
    pair[0].cards, pair[1].cards = ([{"id": "m", "max_model_len": length}] for length in (4096, 8192))
    pair[0].says(refused(TOO_LONG, 400))
    assert {answer.status_code for answer in await asked(pair, 16)} == {200}
    assert pair[0].asked, "it was tried"


async def test_images_go_where_they_were_taken_after_one_refusal(pair: tuple[ScriptedReplica, ScriptedReplica]) -> None:
    pair[0].cards, pair[1].cards = ([{"id": "m", "root": root}] for root in ("text", "vision"))
    pair[0].says(refused(NO_IMAGES, 400))
    pictures = [{"role": "user", "content": f"{n}"} for n in range(1)] + [PICTURE]
    assert {answer.status_code for answer in await asked(pair, 16, messages=pictures)} == {200}
    assert pair[0].asked <= 1
    assert {answer.status_code for answer in await asked(pair, 16)} == {200, 400}, "texts go to both"


async def test_a_refusal_that_all_repeat_is_the_clients(pair: tuple[ScriptedReplica, ScriptedReplica]) -> None:
    for each in pair:
        each.says(refused(UNKNOWN, 404))
    (answer,) = await asked(pair, 1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    assert [each.asked for each in pair] == [1, 1]


async def test_a_refusal_that_is_no_replicas_own_is_not_repeated(pair: tuple[ScriptedReplica, ScriptedReplica]) -> None:
    for each in pair:
        each.says(refused({"message": "temperature must be non-negative", "param": "temperature"}, 400))
    assert {answer.status_code for answer in await asked(pair, 4)} == {400}
    assert sum(each.asked for each in pair) == 4


def test_a_path_that_no_model_has_is_no_missing_model() -> None:
    body = orjson.dumps({"detail": "Not Found"})
    assert own_refusal(404, body, "m", has_longer=True, has_media=True) == ""
    assert own_refusal(404, b"<html>", "m", has_longer=True, has_media=True) == ""


async def test_a_picture_that_all_refuse_is_not_asked_twice_of_replicas_that_take_pictures(
    pair: tuple[ScriptedReplica, ScriptedReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client doubles the work with pictures that no replica can read, or has replicas left out."""
    monkeypatch.setattr(retry_budget, "MIN_RETRIES", 0)
    monkeypatch.setattr(retry_budget, "SHARE", 0)
    pair[0].says(whole(b"{}", "connection: close"))
    async with AsyncExitStack() as stack:
        listed = [{"id": f"r{n}", "url": replica.url} for n, replica in enumerate(pair)]
        gateway, url = await stack.enter_async_context(gateway_before(pair[0], replicas=listed))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url))

        async def show(text: str) -> int:
            url = f"data:image/png;base64,{PIXEL[:-4]}{text}"
            messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
            return (await http.post(CHAT, json={**ASKED, "messages": messages})).status_code

        for n in range(40):
            assert await show(f"{n:04}") == 200
        taken = [each.asked for each in pair]
        assert all(taken)
        for each in pair:
            each.says(refused({"message": "cannot identify image file", "type": "BadRequestError"}, 400))
        assert {await show(f"99{n:02}") for n in range(6)} == {400}
        assert sum(each.asked for each in pair) == sum(taken) + 6
        gateway.fleet.note_media_refusal(["r0"])
        assert not gateway.fleet.refusing_media()


async def test_a_request_that_may_have_run_tools_is_not_run_again_because_it_became_too_long(
    pair: tuple[ScriptedReplica, ScriptedReplica],
) -> None:
    pair[0].cards, pair[1].cards = ([{"id": "m", "max_model_len": length}] for length in (4096, 8192))
    for each in pair:
        each.says(refused(TOO_LONG, 400))
    tools = [{"type": "web_search"}]
    for n in range(1, 7):
        (answer,) = await asked(pair, 1, path="/v1/responses", input=f"Hello {n}", tools=tools)
        assert (answer.status_code, pair[0].asked + pair[1].asked) == (400, n)
    assert pair[0].asked, "a longer one is there"


async def test_another_fault_than_length_is_not_asked_of_a_longer_replica(
    pair: tuple[ScriptedReplica, ScriptedReplica],
) -> None:
    pair[0].cards, pair[1].cards = ([{"id": "m", "max_model_len": length}] for length in (4096, 8192))
    for each in pair:
        each.says(refused({"message": "temperature must be non-negative", "param": "temperature"}, 400))
    assert {answer.status_code for answer in await asked(pair, 8)} == {400}
    assert pair[0].asked + pair[1].asked == 8
