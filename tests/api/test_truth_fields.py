"""The gateway adds fields to requests so that agents learn what engines hold. Clients cannot set these fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.cluster import Cluster
from tests.api.stage import Stage, chat_body, running_agent, running_gateway, running_sims, text
from tests.polling import wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FULL_REPORT = {"kv_cache_report_mode": "full"}


@pytest.fixture
def joined_late(open_cluster: Cluster, http: httpx.Client, tmp_path: Path) -> Iterator[tuple[Stage, str]]:
    """A replica that replays no events, and a prompt that it served before its agent started."""
    arguments = ("--replay-steps", "0", "--model", "org/late-agent", "--served-name", "sim")
    with (
        running_sims(tmp_path, {"late-agent": arguments}) as sims,
        running_gateway(tmp_path, open_cluster.redis_url, sims, {}) as url,
    ):
        stage, early = Stage([url], sims, http), text()
        assert stage.chat(early).decision.endswith("state=degraded")
        with running_agent(tmp_path, open_cluster.redis_url, sims[0]):
            wait_until(lambda: stage.exact() == ["late-agent"])
            yield stage, early


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_cannot_ask_for_a_report_nor_name_a_session(stage: Stage, stream: bool) -> None:
    body = chat_body(text(), stream=stream)
    tip = stage.explain(body)["chain"][-1]["key"]
    for forged in (
        {"session_id": "forged"},
        {"vllm_xargs": FULL_REPORT},
        {"vllm_xargs": {**FULL_REPORT, "session_id": "forged"}, "session_id": "forged"},
        {"vllm_xargs": None},
    ):
        answer = stage.post(CHAT, {**body, **forged}, headers={"x-session-id": "forged"})
        assert answer.status_code == 200
        seen = stage.seen(answer)
        assert (seen["session_id"], seen["vllm_xargs"]) == (tip, {})
        assert {"session_id", "vllm_xargs"}.isdisjoint(seen["body_keys"])


def test_what_was_cached_before_the_agent_came_is_reported_and_becomes_resident(
    joined_late: tuple[Stage, str],
) -> None:
    stage, early = joined_late
    stage.chat(text())  # the sequence number of its event shows the agent that it missed earlier events
    forged: dict[str, Any] = {"vllm_xargs": {"session_id": "forged", "kv_cache_report_mode": "none"}}

    def reported() -> Any:
        seen = stage.seen(stage.post(CHAT, {**chat_body(early), **forged}))
        return seen["vllm_xargs"]

    assert wait_until(reported) == FULL_REPORT
    owner = stage.until_resident(chat_body(early))
    assert owner["tokens"] > 900
    wait_until(lambda: stage.seen(stage.post(CHAT, {**chat_body(early), **forged}))["vllm_xargs"] == {})


def test_several_prompts_in_one_request_name_no_session(stage: Stage) -> None:
    """A session would not tell which prompt a block belongs to."""
    batch = stage.post(COMPLETIONS, {"model": "sim", "max_tokens": 2, "prompt": [text(), text()]})
    assert batch.status_code == 200
    assert stage.seen(batch)["session_id"] is None
    tokens = stage.post(COMPLETIONS, {"model": "sim", "max_tokens": 2, "prompt": [[1, 2, 3], [4, 5, 6]]})
    assert stage.seen(tokens)["session_id"] is None


@pytest.mark.parametrize("prompt", ["a text", ["the only text"], [1, 2, 3], [[1, 2, 3]]])
def test_one_prompt_names_its_session_however_it_is_written(stage: Stage, prompt: Any) -> None:
    body = {"model": "sim", "max_tokens": 2, "prompt": prompt}
    answer = stage.post(COMPLETIONS, body)
    assert answer.status_code == 200
    assert stage.seen(answer)["session_id"] == stage.explain(body, path=COMPLETIONS)["chain"][-1]["key"]


def test_engines_that_name_sessions_are_not_asked_for_token_ids(stage: Stage) -> None:
    answer = stage.post(CHAT, chat_body(text()))
    assert "return_token_ids" not in stage.seen(answer)["body_keys"]
    wanted = stage.post(CHAT, chat_body(text(), return_token_ids=True))
    assert wanted.json()["prompt_token_ids"]
