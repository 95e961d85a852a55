"""Libraries that many programs use instead of an SDK, with a few calls each. Run by `make test-clients`."""

from __future__ import annotations

import pytest

from tests.clients.libraries import Libraries
from tests.clients.stage import Stage

pytestmark = pytest.mark.clients

INSTRUCTOR = ("instructor_driver.py", "")
MODELS = {
    ("langchain_driver.py", ""): "NotFoundError",
    ("langchain_driver.py", "messages_"): "NotFoundError",
    ("litellm_driver.py", ""): "NotFoundError",
    ("ai_sdk.mjs", ""): "APICallError",
}
"""Each library, the prefix of its calls on an API, and its exception for a 404."""
ALL = [*MODELS, INSTRUCTOR]
PROMPT = "tell me who it is"
TOKENS = 64


@pytest.mark.parametrize(("name", "api"), MODELS)
def test_a_stream_says_what_a_plain_answer_says(stage: Stage, library: Libraries, name: str, api: str) -> None:
    whole = library(name).ask(f"{api}plain", stage.urls[0], PROMPT, tokens=TOKENS).answer
    pieces = library(name).ask(f"{api}stream", stage.urls[1], PROMPT, tokens=TOKENS).answer
    assert len(pieces) > 1
    assert "".join(pieces) == whole


def test_an_object_grows_while_it_is_streamed(stage: Stage, library: Libraries) -> None:
    name, _ = INSTRUCTOR
    first, *_, last = library(name).ask("stream", stage.urls[0], PROMPT, tokens=TOKENS).answer
    assert list(first.values()) == [None, None]
    assert_is_person(last)


@pytest.mark.parametrize(("name", "api"), ALL)
def test_an_answer_fits_its_schema(stage: Stage, library: Libraries, name: str, api: str) -> None:
    assert_is_person(library(name).ask(f"{api}structured", stage.urls[0], PROMPT, tokens=TOKENS).answer)


@pytest.mark.parametrize(("name", "api"), ALL)
def test_a_tool_is_called(stage: Stage, library: Libraries, name: str, api: str) -> None:
    called = library(name).ask(f"{api}tool", stage.urls[0], PROMPT, tokens=TOKENS).answer
    assert called["name"] == "Person"
    assert_is_person(called["arguments"])


@pytest.mark.parametrize("name", [name for name, api in MODELS if not api])
def test_a_text_has_an_embedding(stage: Stage, library: Libraries, name: str) -> None:
    embedding, again = (library(name).ask("embedding", url, PROMPT).answer for url in stage.urls)
    assert len(embedding) > 1
    assert embedding == again


@pytest.mark.parametrize(("name", "api"), MODELS)
def test_an_error_is_the_librarys_own_exception(stage: Stage, library: Libraries, name: str, api: str) -> None:
    error = library(name).ask(f"{api}plain", stage.urls[0], PROMPT, model="unknown").error
    assert error.status == 404
    assert MODELS[name, api] in error.kinds
    assert "`unknown` is not served here" in error.message


def test_an_error_of_instructor_says_what_the_gateway_said(stage: Stage, library: Libraries) -> None:
    name, _ = INSTRUCTOR
    error = library(name).ask("tool", stage.urls[0], PROMPT, model="unknown").error
    assert "InstructorError" in error.kinds
    assert "`unknown` is not served here" in error.message


@pytest.mark.parametrize(("name", "api"), ALL)
def test_a_stream_that_breaks_raises(stage: Stage, library: Libraries, name: str, api: str) -> None:
    with stage.failing("cut", after_tokens=3):
        error = library(name).ask(f"{api}stream", stage.urls[0], PROMPT, tokens=TOKENS).error
    assert "incomplete" in error.message


def assert_is_person(found: dict[str, object]) -> None:
    assert found.keys() == {"name", "age"}
    assert isinstance(found["name"], str)
    assert isinstance(found["age"], int)
