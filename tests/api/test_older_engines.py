"""Engines whose events name no sessions (vLLM before 0.30). The gateway recognises a prompt by its token ids. It asks
the engine for them and hides them from the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from bench.cluster import Cluster
from gateway.ops.local.ports import free_ports
from tests.api.stage import Json, Stage, chat_body, running_agent, running_gateway, running_sims, text
from tests.gateway.simulator.pictures import image_part
from tests.polling import wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def old(open_cluster: Cluster, http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A simulated vLLM 0.29 behind one gateway. Its agent needs the events' address as an option."""
    folder = tmp_path_factory.mktemp("old")
    events, replay = free_ports(2)
    publisher = ("--vllm-version", "0.29.0", "--events-port", str(events), "--replay-port", str(replay))
    endpoints = ("--events", f"tcp://127.0.0.1:{events}", "--replay", f"tcp://127.0.0.1:{replay}")
    with (
        running_sims(folder, {"old": (*publisher, "--model", "org/old", "--served-name", "sim")}) as sims,
        running_gateway(folder, open_cluster.redis_url, sims, {}) as url,
        running_agent(folder, open_cluster.redis_url, sims[0], *endpoints),
    ):
        stage = Stage([url], sims, http)
        wait_until(lambda: stage.exact() == ["old"])
        stage.post(CHAT, body_for(CHAT, stream=True))  # of a replica's first stream, nobody asks for its usage
        yield stage


def completion_body(prompt: Any, **fields: Any) -> Json:
    return {"model": "sim", "max_tokens": 4, "prompt": prompt, **fields}


def body_for(path: str, **fields: Any) -> Json:
    return chat_body(text(), **fields) if path == CHAT else completion_body(text(), **fields)


def until_resident(stage: Stage, path: str, body: Json) -> None:
    def is_resident() -> bool:
        asked = {name: value for name, value in body.items() if name not in ("stream", "return_token_ids")}
        owners = stage.explain(asked, path=path)["chain"][-1]["owners"]
        return any(owner["kind"] == "resident" for owner in owners)

    wait_until(is_resident)


def content_of(answer: httpx.Response) -> str:
    """The joined text of a stream's chunks."""
    chunks = [orjson.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_becomes_resident_and_its_client_sees_no_token_ids(old: Stage, path: str, stream: bool) -> None:
    body = body_for(path, stream=stream)
    cold = old.post(path, body)
    assert cold.status_code == 200
    assert "return_token_ids" in old.seen(cold)["body_keys"]
    assert "token_ids" not in cold.text
    until_resident(old, path, body)

    warm = old.post(path, body)
    assert warm.headers["x-kvgate-decision"] == "hit; policy=prefix_kv_aware; state=exact"
    assert int(warm.headers["x-kvgate-matched-tokens"]) > 900
    assert "return_token_ids" not in old.seen(warm)["body_keys"]  # the gateway already knows them
    if stream:
        assert warm.text.rstrip().endswith("data: [DONE]")
        assert content_of(cold) == content_of(warm) != ""
    else:
        assert warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 900
        assert cold.json()["choices"][0].get("text") == warm.json()["choices"][0].get("text")
        assert cold.json()["usage"]["prompt_tokens"] == warm.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_client_that_asks_for_token_ids_gets_them_and_the_map_learns_from_them(
    old: Stage, path: str, stream: bool
) -> None:
    body = body_for(path, stream=stream, return_token_ids=True)
    for _ in range(2):
        answer = old.post(path, body)
        assert answer.status_code == 200
        assert answer.headers["x-kvgate-decision"].endswith("state=exact")
        assert '"prompt_token_ids":[' in answer.text.replace(" ", "")
        until_resident(old, path, body)


def test_prompts_whose_events_come_after_their_measured_lengths_become_resident_too(old: Stage) -> None:
    bodies = [chat_body(text()) for _ in range(4)]
    with old.failing("drop_events"):  # a replay has them, up to a second later
        for body in bodies:
            assert old.post(CHAT, body).status_code == 200
        for body in bodies:
            until_resident(old, CHAT, body)


def test_a_client_that_says_it_wants_none_gets_none(old: Stage) -> None:
    body = chat_body(text(), return_token_ids=False)
    assert "token_ids" not in old.post(CHAT, body).text
    until_resident(old, CHAT, body)


def test_a_conversation_with_an_image_is_recognised(old: Stage) -> None:
    asked = chat_body([{"type": "text", "text": text(1000)}, image_part(90), {"type": "text", "text": text(1000)}])
    answer = old.post(CHAT, asked).json()["choices"][0]["message"]["content"]
    until_resident(old, CHAT, asked)
    turns = [*asked["messages"], {"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
    goes_on = {**asked, "messages": turns}
    placed = old.post(CHAT, goes_on)
    usage = placed.json()["usage"]
    assert abs(int(placed.headers["x-kvgate-matched-tokens"]) - usage["prompt_tokens_details"]["cached_tokens"]) <= 16


def test_several_prompts_in_one_request_are_not_asked_for(old: Stage) -> None:
    answer = old.post(COMPLETIONS, completion_body([text(), text()]))
    assert answer.status_code == 200
    assert "return_token_ids" not in old.seen(answer)["body_keys"]


def test_an_error_of_the_replica_passes_as_it_is(old: Stage) -> None:
    answer = old.post(CHAT, chat_body(text(), max_tokens=-1))
    assert answer.status_code == 400
    assert "max_tokens" in answer.json()["error"]["message"]
