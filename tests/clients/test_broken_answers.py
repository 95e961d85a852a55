"""No client may take a broken answer for a whole one: the official SDKs raise, whatever the cause.

Run by `make test-clients`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.clients.libraries import Libraries
from tests.clients.stage import REQUEST_S, Stage

pytestmark = pytest.mark.clients

OPENAI_STREAMS = ("chat_stream", "chat_helper", "completions_stream", "responses_stream", "responses_helper")
ANTHROPIC_STREAMS = ("messages_stream", "messages_helper")
OPENAI_SDKS = ("openai_sdk.py", "openai_sdk.mjs")
ANTHROPIC_SDKS = ("anthropic_sdk.py", "anthropic_sdk.mjs")
STREAMS = [
    *((sdk, call) for sdk in OPENAI_SDKS for call in OPENAI_STREAMS),
    *((sdk, call) for sdk in ANTHROPIC_SDKS for call in ANTHROPIC_STREAMS),
]
WHOLE = [
    *((sdk, call) for sdk in OPENAI_SDKS for call in ("chat", "completions", "responses")),
    *((sdk, "messages") for sdk in ANTHROPIC_SDKS),
]

NOT_TOLD = {"JSONDecodeError", "SyntaxError", "APITimeoutError", "APIConnectionTimeoutError"}
"""Exceptions for half an answer that was delivered as a whole one, or for a client that waited for the rest in vain."""

Scene = AbstractContextManager[tuple[str, Callable[[], Any]]]
"""A gateway's URL, and the function that breaks the answer once it has begun."""


@dataclass(frozen=True)
class Break:
    """A cause of a broken answer."""

    name: str
    told: str
    """Words in the message of the SDK's exception; empty if no gateway is left to send an error."""
    happens: Callable[[Stage], Scene]


def _nothing() -> None:
    """For answers that break by themselves."""


@contextmanager
def _fault(stage: Stage, mode: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    with stage.failing(mode, after_tokens=3):
        yield stage.urls[0], _nothing


@contextmanager
def _killed_replica(stage: Stage) -> Iterator[tuple[str, Callable[[], Any]]]:
    try:
        yield stage.urls[1], lambda: stage.carrier().kill()
    finally:
        stage.revive()


@contextmanager
def _deadline(stage: Stage) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield stage.hurried_url, _nothing


@contextmanager
def _ended_gateway(stage: Stage, number: signal.Signals) -> Iterator[tuple[str, Callable[[], Any]]]:
    with stage.another_gateway(timeouts={"grace_s": 0.3}) as gateway:
        yield gateway.url, lambda: gateway.process.send_signal(number)


BREAKS = (
    Break("its engine fails", "Simulated failure", lambda stage: _fault(stage, "error")),
    Break("its connection is cut", "incomplete", lambda stage: _fault(stage, "cut")),
    Break("it ends early", "incomplete", lambda stage: _fault(stage, "truncate")),
    Break("its replica is killed", "incomplete", _killed_replica),
    Break("its time is over", f"No complete answer within {REQUEST_S} s", _deadline),
    Break("its gateway is told to stop", "This gateway stopped", lambda stage: _ended_gateway(stage, signal.SIGTERM)),
    Break("its gateway is killed", "", lambda stage: _ended_gateway(stage, signal.SIGKILL)),
)


@pytest.mark.parametrize(("sdk", "call"), STREAMS)
def test_an_unbroken_stream_is_read_to_its_end(stage: Stage, library: Libraries, sdk: str, call: str) -> None:
    pieces = library(sdk).ask(call, stage.urls[0], stage.new_prompt(), tokens=5).answer
    assert len("".join(pieces).split()) == 5, pieces


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.name)
@pytest.mark.parametrize(("sdk", "call"), STREAMS)
def test_an_sdk_raises_on_a_stream_when(stage: Stage, library: Libraries, sdk: str, call: str, broken: Break) -> None:
    with broken.happens(stage) as (url, strike):
        library(sdk).begin(call, url, stage.new_prompt(), tokens=4000)
        library(sdk).wait_until_begun()
        strike()
        error = library(sdk).outcome().error
    assert broken.told in error.message
    if broken.told:
        assert "APIError" in error.kinds, "its own exception"


@pytest.mark.parametrize(("sdk", "call"), WHOLE)
def test_a_large_answer_is_read_to_its_end(stage: Stage, library: Libraries, sdk: str, call: str) -> None:
    answer = library(sdk).ask(call, stage.urls[0], stage.new_prompt(), model="whole").answer
    assert answer["text"].count("word") == 800_000


@pytest.mark.parametrize("model", ["cut", "cut-chunked", "silent"])
@pytest.mark.parametrize(("sdk", "call"), WHOLE)
def test_an_sdk_raises_on_a_large_answer_that_breaks_off_half_way(
    stage: Stage, library: Libraries, sdk: str, call: str, model: str
) -> None:
    """The `silent` answer breaks off at the gateway's time limit."""
    error = library(sdk).ask(call, stage.hurried_url, stage.new_prompt(), model=model).error
    assert not NOT_TOLD & set(error.kinds), error


@pytest.mark.parametrize(("sdk", "call"), WHOLE)
def test_an_sdk_raises_on_a_large_answer_whose_gateway_is_told_to_stop(
    stage: Stage, library: Libraries, sdk: str, call: str
) -> None:
    with _ended_gateway(stage, signal.SIGTERM) as (url, strike):
        library(sdk).begin(call, url, stage.new_prompt(), model="silent")
        assert stage.half.fell_silent.acquire(timeout=30)
        strike()
        error = library(sdk).outcome().error
    assert not NOT_TOLD & set(error.kinds), error
