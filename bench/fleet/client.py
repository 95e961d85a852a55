"""Clients on raw connections, because a client library would cost as much as a gateway. Each connection has one request
at a time, and stays open for the next one."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson

PATH = "/v1/chat/completions"
_EVENT = re.compile(rb"^data: ?(\{.*)$", re.MULTILINE)


class NoAnswer(Exception):
    """The request got no complete answer. Its text is the kind of the failure."""


@dataclass
class Answer:
    """What one request got."""

    status: int = 0
    worker: str = ""
    """The replica that the gateway or the replica itself names."""
    decision: str = ""
    """Why the gateway chose it: the first word of its receipt."""
    body: bytearray = field(default_factory=bytearray)
    first_byte_s: float = 0.0

    def read(self, streams: bool) -> tuple[str, dict[str, Any]]:
        """The answer's text and its usage. Raises NoAnswer."""
        if self.status != 200:
            raise NoAnswer(f"status {self.status} {_code_of(self.body)}".rstrip())
        try:
            if not streams:
                document = orjson.loads(self.body)
                return document["choices"][0]["message"]["content"] or "", document["usage"]
            return _joined(self.body)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise NoAnswer("incomplete") from error


def _joined(body: bytearray) -> tuple[str, dict[str, Any]]:
    """The text and the usage of a stream."""
    usage: dict[str, Any] = {}
    said: list[str] = []
    for found in _EVENT.findall(body):
        event = orjson.loads(found)
        usage = event.get("usage") or usage
        said += [choice["delta"].get("content") or "" for choice in event["choices"]]
    if not usage or not body.endswith(b"data: [DONE]\n\n"):
        raise NoAnswer("incomplete")
    return "".join(said), usage


def _code_of(body: bytes | bytearray) -> str:
    """The code of an error in OpenAI's form; empty if it has none."""
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[Answer] | None = None
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end(NoAnswer("connection lost"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end(NoAnswer("not HTTP"))
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"x-kvgate-replica", b"x-light-replica"):
            self._answer.worker = value.decode()
        elif name == b"x-kvgate-decision":
            self._answer.decision = value.decode().partition(";")[0]

    def on_body(self, body: bytes) -> None:
        if not self._answer.first_byte_s:
            self._answer.first_byte_s = self._loop.time()
        self._answer.body += body

    def on_message_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._answer)

    def _end(self, error: NoAnswer) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    async def send(self, request: bytes) -> Answer:
        self._answer = Answer()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = self._loop.create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    @property
    def has_answered(self) -> bool:
        """Whether any byte of the last answer's body has come."""
        return bool(self._answer.body)

    def close(self) -> None:
        self.is_open = False
        self._transport.close()


class Client:
    """Pooled connections to any number of servers."""

    def __init__(self, answer_s: float, api_key: str = "") -> None:
        self._answer_s = answer_s
        self._authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._free: dict[str, deque[_Connection]] = {}

    async def post(self, url: str, document: Any) -> Answer:
        """One chat request. Raises NoAnswer."""
        where = urlsplit(url)
        body = orjson.dumps(document)
        head = f"POST {PATH} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        request = f"{head}{self._authorization}content-length: {len(body)}\r\n\r\n".encode() + body
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._send(url, where.hostname or "", where.port or 80, request)
        except TimeoutError:
            raise NoAnswer("no answer in time") from None
        except OSError as error:
            raise NoAnswer(error.strerror or type(error).__name__) from None

    async def _send(self, url: str, host: str, port: int, request: bytes) -> Answer:
        free = self._free.setdefault(url, deque())
        while free:
            connection = free.pop()
            if connection.is_open:
                try:
                    return await self._on(connection, free, request)
                except NoAnswer:
                    if connection.is_open or connection.has_answered:
                        raise
                # The server has closed an idle connection while this request was on its way.
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, port)
        return await self._on(connection, free, request)

    async def _on(self, connection: _Connection, free: deque[_Connection], request: bytes) -> Answer:
        try:
            answer = await connection.send(request)
        except BaseException:
            if connection.is_open:
                connection.close()  # a cancelled request's answer may still come
            raise
        if connection.is_open:
            free.append(connection)
        return answer

    def close(self) -> None:
        for free in self._free.values():
            for connection in free:
                connection.close()
