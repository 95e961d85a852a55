"""The attacked gateway, and a client for it. The client writes HTTP/1.1 by hand, so that requests can be wrong and the
end of each answer is known exactly."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httptools
import orjson
from prometheus_client.parser import text_string_to_metric_families

ATTACKER = "127.0.0.1"
LIMIT_BYTES = 64 * 2**20
"""A gateway's default limit for a body."""
_SHOWN_BYTES = 2**20
_READ_BYTES = 2**18
_ERROR_CODE = re.compile(rb'"code": ?"(\w+)"')


def honest_address() -> str:
    """An address other than the attacker's, if this machine has one."""
    with closing(socket.socket()) as sock:
        try:
            sock.bind(("127.0.0.2", 0))
        except OSError:
            return ATTACKER
    return "127.0.0.2"


class Answers:
    """The answers on one connection. httptools' callbacks fill it."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        """Statuses of complete answers."""
        self.status = 0
        """The status of the last answer, complete or not."""
        self.beginning = b""
        """The beginning of its body: at most one MiB."""
        self.end = b""
        self.size_bytes = 0
        self.is_complete = False
        self.why = ""
        """How the connection ended before the answer was complete."""
        self._parser = httptools.HttpResponseParser(self)

    def __str__(self) -> str:
        """A status and an error code, or how the connection ended."""
        if not self.status:
            return f"no answer: {self.why}"
        codes = _ERROR_CODE.findall(self.end)
        text = f"{self.status} {codes[-1].decode()}" if codes else str(self.status)
        return text if self.is_complete else f"{text}, broken off after {self.size_bytes:,} bytes: {self.why}"

    async def read(self, reader: asyncio.StreamReader, count: int = 1) -> None:
        """Reads until this many answers are complete, or the connection ends."""
        try:
            while self.statuses.total() < count:
                data = await reader.read(_READ_BYTES)
                if not data:
                    self.why = "closed"
                    return
                self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            self.why = "reset" if isinstance(error, OSError) else f"not HTTP: {error}"

    def on_message_begin(self) -> None:
        self.status, self.beginning, self.end, self.size_bytes, self.is_complete = 0, b"", b"", 0, False

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self.size_bytes < _SHOWN_BYTES:
            self.beginning += data
        self.size_bytes += len(data)
        self.end = (self.end + data)[-4096:]

    def on_message_complete(self) -> None:
        self.is_complete = True
        self.statuses[self.status] += 1


@dataclass(frozen=True)
class Target:
    """A gateway, and what is known about it from outside."""

    host: str
    port: int
    pid: int
    log: Path
    replicas_url: str = ""
    """The URL at which the lying replicas report what they saw."""
    honest: str = field(default_factory=honest_address)
    """The address of honest clients."""

    async def connect(
        self, source: str = ATTACKER, receive_bytes: int = 0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection from one of this machine's addresses. `receive_bytes` is the client's own buffer. Raises
        OSError."""
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        try:
            sock.bind((source, 0))
            await asyncio.get_running_loop().sock_connect(sock, (self.host, self.port))
        except BaseException:
            sock.close()
            raise
        return await asyncio.open_connection(sock=sock, limit=2**20)

    async def ask(self, request: Iterable[bytes], source: str = ATTACKER) -> Answers:
        """Sends one request and reads its answer at the same time."""
        answers = Answers()
        try:
            reader, writer = await self.connect(source)
        except OSError as error:
            answers.why = f"cannot connect ({error.strerror})"
            return answers
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(send(writer, request))
                await answers.read(reader)
                sending.cancel()
        finally:
            writer.transport.abort()
        return answers

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels. Raises LookupError if the gateway does not have the
        metric."""
        answer = await self.ask([head("GET", "/metrics", close=True)])
        families = {family.name: family for family in text_string_to_metric_families(answer.beginning.decode())}
        family = families.get(name.removesuffix("_total"))
        if family is None:
            raise LookupError(f"no {name} in /metrics")
        return sum(sample.value for sample in family.samples if labels.items() <= sample.labels.items())


def head(
    method: str, path: str, length: int | None = None, kind: str = "application/json", close: bool = False
) -> bytes:
    """A request's head."""
    lines = [f"{method} {path} HTTP/1.1", "host: gateway"]
    lines += [f"content-type: {kind}", f"content-length: {length}"] if length is not None else []
    lines += ["connection: close"] if close else []
    return "\r\n".join([*lines, "", ""]).encode()


def post(path: str, body: bytes, kind: str = "application/json") -> list[bytes]:
    """A request in pieces."""
    return [head("POST", path, len(body), kind), body]


def chat(text: bytes = b"hello", *, lie: str = "", stream: bool = False) -> bytes:
    """The body of a chat. `lie` names the lie of bench.attacks.replicas."""
    asked = b'"stream":true,' if stream else b""
    said = b"lie:%b %b" % (lie.encode(), text) if lie else text
    return b'{"model":"canned","max_tokens":16,%b"messages":[{"role":"user","content":"%b"}]}' % (asked, said)


async def send(writer: asyncio.StreamWriter, pieces: Iterable[bytes]) -> None:
    """Sends as fast as the gateway reads, until all is sent or the gateway stops reading."""
    with suppress(OSError):
        for piece in pieces:
            for start in range(0, len(piece), _READ_BYTES):
                writer.write(memoryview(piece)[start : start + _READ_BYTES])
                await writer.drain()


def counted(answers: Iterable[object]) -> str:
    """Counts equal answers, the most frequent first."""
    kinds = Counter(map(str, answers))
    return ", ".join(f"{kind} x{count}" if count > 1 else kind for kind, count in kinds.most_common())


async def seen_by_replicas(target: Target) -> Counter[str]:
    """How often replicas were asked for each lie."""
    host, _, port = target.replicas_url.removeprefix("http://").partition(":")
    replicas = Target(host, int(port), 0, target.log)
    answer = await replicas.ask([head("GET", "/attacks/seen", close=True)])
    return Counter(orjson.loads(answer.beginning))
