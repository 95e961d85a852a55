"""A worker process reads a body as this process does. When a worker ends, other requests are not affected."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.errors import ApiError
from gateway.prompt import CacheScope, PromptLimits, Steps
from gateway.prompt.steps import UNBOUNDED
from gateway.request.reading import BodyHead, BodyRules, ParsedBody, read_body
from gateway.request.reading import body_readers as processes
from gateway.request.reading.body_readers import BodyReaders
from tests.gateway.prompt.test_prompt_images import PNG, data_url
from tests.polling import eventually

RULES = BodyRules(("session_id",), ("session_id",), PromptLimits(10**8))
CHAT = BodyHead("/v1/chat/completions", "application/json")


def resolve_scopes(path: str, model: str | None, cache_salt: str | None) -> list[CacheScope]:
    if model == "nonesuch":
        raise ApiError(404, "model_not_found", "no such model", "model", {"x-more": "1"})
    return [CacheScope(f"{path} {model}", None, cache_salt)]


def chat(*content: Any, **fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": list(content)}], **fields})


@pytest.fixture
async def readers() -> AsyncIterator[BodyReaders]:
    readers = BodyReaders()
    yield readers
    await readers.close()


async def read(readers: BodyReaders, body: bytes, head: BodyHead = CHAT) -> ParsedBody:
    async with readers.turns.take("somebody"):
        return await readers.read(head, body, RULES, resolve_scopes)


def children() -> set[int]:
    """The running worker processes of this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return {
        pid for pid in found if b"gateway.request.reading.worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


IMAGE = {"type": "image_url", "image_url": {"url": data_url(PNG)}}
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
    b'--x\r\nContent-Disposition: form-data; name="session_id"\r\n\r\nforged\r\n--x--\r\n'
)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (CHAT, chat({"type": "text", "text": "x" * 3_000_000})),
        (CHAT, chat(IMAGE, session_id="forged", cache_salt="s", stream=True)),
        (BodyHead("/v1/audio/transcriptions", "multipart/form-data; boundary=x"), FORM),
        (BodyHead("/v1/nonesuch", "application/json"), b'{"a":1}'),
        (BodyHead("", "application/json"), orjson.dumps({"model": "m", "input": [1, 2, 3]})),
    ],
)
async def test_a_body_is_read_as_it_is_here(readers: BodyReaders, head: BodyHead, body: bytes) -> None:
    here, there = read_body(head, body, RULES, resolve_scopes, Steps(UNBOUNDED)), await read(readers, body, head)
    assert replace(here, model_at=there.model_at) == there
    if there.model is not None:
        assert there.model_at is not None
        begin, end = there.model_at
        assert (there.body or body)[begin:end] in (b'"m"', b"m"), "so that nobody has to look for it in a large body"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_json", "body"),
        (chat({"type": "text"}), "invalid_value", "messages[0].content[0].text"),
        (orjson.dumps({"model": "nonesuch", "messages": []}), "model_not_found", "model"),
        (orjson.dumps({"model": "m", "messages": [{}] * 16_385}), "limit_exceeded", "messages"),
    ],
)
async def test_a_bad_body_is_refused_as_it_is_here_and_the_process_goes_on(
    readers: BodyReaders, body: bytes, code: str, param: str
) -> None:
    with pytest.raises(ApiError) as here:
        read_body(CHAT, body, RULES, resolve_scopes, Steps(UNBOUNDED))
    with pytest.raises(ApiError) as there:
        await read(readers, body)
    assert (there.value.code, there.value.param) == (code, param)
    assert there.value == here.value
    before = children()
    assert (await read(readers, chat())).model == "m"
    assert children() == before


async def test_a_process_that_dies_costs_the_request_that_it_read_and_no_other(readers: BodyReaders) -> None:
    await read(readers, chat())
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    reading = asyncio.ensure_future(read(readers, chat()))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ApiError) as failed:
        await reading
    assert (failed.value.status, failed.value.code) == (500, "internal_error")
    assert (await read(readers, chat())).model == "m"


async def test_a_process_that_hangs_is_replaced(readers: BodyReaders, monkeypatch: pytest.MonkeyPatch) -> None:
    await read(readers, chat())
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr("gateway.request.reading.body_readers.LIMIT_S", 0.1)
    with pytest.raises(ApiError):
        await read(readers, chat())
    monkeypatch.undo()
    assert (await read(readers, chat())).model == "m"
    await eventually(lambda: pid not in children())


async def test_a_client_that_hangs_up_while_its_body_is_read_frees_its_turn(readers: BodyReaders) -> None:
    await asyncio.gather(read(readers, chat()), read(readers, chat()))
    stopped = children()
    assert len(stopped) == 2
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)  # neither finishes its work
    gone = [asyncio.ensure_future(read(readers, chat())) for _ in range(2)]
    other = asyncio.ensure_future(read(readers, chat()))
    await asyncio.sleep(0)
    for reading in gone:
        reading.cancel()
    assert (await other).model == "m"


async def test_a_process_that_nobody_needs_any_more_ends(readers: BodyReaders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "IDLE_S", 0.05)
    before = children()
    await asyncio.gather(*(read(readers, chat()) for _ in range(3)))
    await eventually(lambda: children() == before)
    assert (await read(readers, chat())).model == "m", "another one is started"


async def test_processes_end_with_their_gateway(readers: BodyReaders) -> None:
    await read(readers, chat())
    assert children()
    await readers.close()
    assert not children()
