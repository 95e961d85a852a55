"""Each official SDK raises its own exception for an error, with the message and the request's id.

Run by `make test-clients`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.api.stage import api_key, bearer, chat_body
from tests.clients.libraries import Libraries
from tests.clients.stage import Stage
from tests.polling import wait_until

pytestmark = pytest.mark.clients

SDKS = {
    "openai_sdk.py": "chat",
    "openai_sdk.mjs": "chat",
    "anthropic_sdk.py": "messages",
    "anthropic_sdk.mjs": "messages",
}
STRICT: dict[str, Any] = {
    "security": {"api_keys": [api_key("alice", "research")], "cache_salt_secret": "canary-cache-salt-secret"},
    "limits": {"max_in_flight": 1, "max_body_bytes": 10_000},
}


@dataclass
class Places:
    """Gateways that refuse requests: those of the cluster, and a strict one that wants a key, short bodies and one
    request at a time."""

    stage: Stage
    strict_url: str


@pytest.fixture(scope="module")
def places(stage: Stage) -> Iterator[Places]:
    with stage.another_gateway(**STRICT) as strict:
        yield Places(stage, strict.url)


@dataclass(frozen=True)
class Wrong:
    """A request that is refused or fails. The error's message contains `told`."""

    name: str
    status: int
    kind: str
    """The exception's class or one of its base classes."""
    told: str
    at: Callable[[Places], AbstractContextManager[str]]
    """Yields the URL of the gateway to ask."""
    question: dict[str, Any] = field(default_factory=dict)


def _cluster(places: Places) -> AbstractContextManager[str]:
    return nullcontext(places.stage.urls[0])


def _hurried(places: Places) -> AbstractContextManager[str]:
    return nullcontext(places.stage.hurried_url)


def _strict(places: Places) -> AbstractContextManager[str]:
    return nullcontext(places.strict_url)


@contextmanager
def _full(places: Places) -> Iterator[str]:
    body = chat_body("tell me a story", max_tokens=4000, stream=True)
    url = f"{places.strict_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=bearer("alice")) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces)
        yield places.strict_url
    body = chat_body("is there room?")
    wait_until(lambda: httpx.post(url, json=body, headers=bearer("alice")).status_code == 200)


def _failing(mode: str, **details: Any) -> Callable[[Places], AbstractContextManager[str]]:
    @contextmanager
    def at(places: Places) -> Iterator[str]:
        with places.stage.failing(mode, **details):
            yield places.stage.urls[0]

    return at


ALICE = {"key": "secret-alice"}
WRONGS = (
    Wrong("a wrong type", 400, "BadRequestError", "messages[0].content", _cluster, {"prompt": 17}),
    Wrong("what engines refuse", 400, "BadRequestError", "max_tokens", _cluster, {"tokens": 0}),
    Wrong("an unknown key", 401, "AuthenticationError", "not known here", _strict, {"key": "secret-mallory"}),
    Wrong("an unknown model", 404, "NotFoundError", "`unknown` is not served", _cluster, {"model": "unknown"}),
    Wrong("a large body", 413, "APIError", "10000 bytes", _strict, {"prompt": "story " * 2000, **ALICE}),
    Wrong("no room", 429, "RateLimitError", "in flight", _full, ALICE),
    Wrong("engines that fail", 500, "InternalServerError", "Simulated failure", _failing("error")),
    Wrong("engines that hang up", 502, "InternalServerError", "No replica answered", _failing("reset")),
    Wrong("no engine", 503, "InternalServerError", "Simulated failure", _failing("error", status=503)),
    Wrong("no time", 504, "InternalServerError", "No complete answer", _hurried, {"tokens": 4000}),
)


@pytest.mark.parametrize("wrong", WRONGS, ids=lambda wrong: wrong.name)
@pytest.mark.parametrize("sdk", SDKS)
def test_an_error_is_the_sdks_own_exception(places: Places, library: Libraries, sdk: str, wrong: Wrong) -> None:
    request_id = f"clients-{wrong.status}"
    question = {"prompt": places.stage.new_prompt(), **wrong.question}
    with wrong.at(places) as url:
        error = library(sdk).ask(SDKS[sdk], url, headers={"x-request-id": request_id}, **question).error
    assert (error.status, wrong.kind in error.kinds) == (wrong.status, True), error
    assert wrong.told in error.message
    assert error.request_id == request_id


@pytest.mark.parametrize("sdk", SDKS)
def test_an_answer_tells_the_requests_id(stage: Stage, library: Libraries, sdk: str) -> None:
    headers = {"x-request-id": "clients-200"}
    answer = library(sdk).ask(SDKS[sdk], stage.urls[1], stage.new_prompt(), headers=headers).answer
    assert answer["text"]
    assert answer["request_id"] == "clients-200"
