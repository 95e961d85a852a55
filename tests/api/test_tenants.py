"""Tenants: no tenant can find another tenant's prompts in the cache, or see its requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.stage import Stage, bearer, cached_tokens_of, chat_body, error_of, text, user


def cached_tokens(stage: Stage, name: str, body: dict[str, Any], gateway: int = 0) -> int:
    """How many of this prompt's tokens the engine had cached."""
    answer = stage.post("/v1/chat/completions", body, gateway, headers=bearer(name))
    assert answer.status_code == 200, answer.text
    return cached_tokens_of(answer.json())


def test_a_tenants_keys_share_what_is_cached(guarded: Stage) -> None:
    body = chat_body(text())
    assert cached_tokens(guarded, "alice", body) == 0
    assert cached_tokens(guarded, "anna", body, gateway=1) > 900
    assert cached_tokens(guarded, "alice", body, gateway=1) > 900


def test_tenants_never_share_what_is_cached(guarded: Stage) -> None:
    body = chat_body(text())
    # Three tenants, two replicas: at least one tenant reaches a replica that already has the prompt.
    for name in ("alice", "bob", "root"):
        assert cached_tokens(guarded, name, body) == 0
    for name in ("alice", "bob", "root"):
        assert cached_tokens(guarded, name, body, gateway=1) > 900


def test_a_forged_salt_opens_no_other_tenants_cache(guarded: Stage) -> None:
    context = text()
    salted = chat_body(context, cache_salt="pepper")
    assert cached_tokens(guarded, "alice", salted) == 0
    assert cached_tokens(guarded, "bob", salted) == 0
    duplicate = (
        b'{"cache_salt":"x","model":"sim","max_tokens":2,"cache_\\u0073alt":"pepper","messages":[{"role":"user",'
        b'"content":"' + context.encode() + b'"}]}'
    )
    headers = {**bearer("bob"), "content-type": "application/json"}
    answer = guarded.post("/v1/chat/completions", content=duplicate, headers=headers)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 900  # the prompt under bob's own "pepper"


def test_a_clients_salt_separates_within_its_tenant(guarded: Stage) -> None:
    context = text()
    for salt in ("one", "two"):
        assert cached_tokens(guarded, "alice", chat_body(context, cache_salt=salt)) == 0
    assert cached_tokens(guarded, "alice", chat_body(context)) == 0
    assert cached_tokens(guarded, "anna", chat_body(context, cache_salt="one")) > 900


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": text()}),
        ("/v1/responses", {"input": text(), "max_output_tokens": 2}),
        ("/v1/messages", {"messages": user(text()), "max_tokens": 2}),
    ],
)
def test_every_apis_prompts_are_kept_apart(guarded: Stage, path: str, body: dict[str, Any]) -> None:
    def cached(name: str) -> int:
        answer = guarded.post(path, {"model": "sim", **body}, headers=bearer(name))
        assert answer.status_code == 200
        return int(guarded.seen(answer)["cached_tokens"])

    assert [cached("alice"), cached("bob"), cached("root")] == [0, 0, 0]
    assert min(cached("alice"), cached("bob"), cached("root")) > 900


def test_tenants_that_trust_each_other_share(sharing: Stage) -> None:
    body = chat_body(text())
    assert cached_tokens(sharing, "alice", body) == 0
    assert cached_tokens(sharing, "bob", body) > 900
    assert cached_tokens(sharing, "bob", chat_body(body["messages"][0]["content"], cache_salt="own")) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/messages",
            {"messages": user([{"type": "image", "source": {"type": "url", "url": "http://evil.example/a"}}])},
        ),
        (
            "/v1/messages/count_tokens",
            {"messages": user([{"type": "image", "source": {"type": "url", "url": "http://evil.example/a"}}])},
        ),
        ("/v1/responses", {"input": user([{"type": "input_image", "image_url": "http://evil.example/a"}])}),
        (
            "/v1/responses",  # vLLM reads every item that has a role as a message
            {
                "input": [
                    {
                        "type": "item_reference",
                        "id": "item",
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": "http://evil.example/a"}],
                    }
                ]
            },
        ),
        (
            "/v1/score",  # vLLM uses the pair that it can read
            {
                "queries": "a",
                "documents": "b",
                "data_1": "a",
                "data_2": {"content": [{"type": "video_url", "video_url": {"url": "http://evil.example/a"}}]},
            },
        ),
        *(("/v1/systemone", {name: ["http://evil.example/a"]}) for name in ("images", "audio", "videos")),
        ("/v1/nonesuch", {"deep": [{"down": {"image_url": {"url": "http://evil.example/a"}}}]}),
        (
            "/v1/chat/completions",
            {"messages": user([{"type": "video_url", "video_url": {"url": "http://evil.example/a"}}])},
        ),
        ("/v1/embeddings", {"messages": user([{"type": "audio_url", "audio_url": {"url": "http://evil.example/a"}}])}),
    ],
)
def test_every_path_and_medium_is_held_to_the_allowed_hosts(guarded: Stage, path: str, body: dict[str, Any]) -> None:
    seen = guarded.requests_seen()
    answer = guarded.post(path, {"model": "sim", "max_tokens": 2, **body}, headers=bearer("alice"))
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "image_host_not_allowed"
    assert guarded.requests_seen() == seen


@pytest.mark.parametrize("path", ["/v2/embed", "/cohere/v2/chat"])
def test_where_the_engine_cannot_keep_tenants_apart_they_are_refused(guarded: Stage, path: str) -> None:
    refused = guarded.post(path, {"model": "sim", "messages": user("x"), "texts": ["x"]}, headers=bearer("alice"))
    assert (refused.status_code, error_of(refused)["code"]) == (403, "cache_not_isolated")
