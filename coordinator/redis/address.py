"""Where a pool's keys are, and a connection to there.

    redis://host:6379/0   rediss:// (TLS)   unix:///path     one server
    redis+sentinel://host:26379,host2:26379/NAME/0           the master that these sentinels call NAME
    redis+cluster://host:6379,host2:6379                     a Redis Cluster: some of its nodes, to ask for the others

(rediss+sentinel:// and rediss+cluster:// with TLS.) The server is looked up for every connection and never remembered.
So after a connection is lost, the next look-up finds the new master, or the node that has the pool's slot now.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from redis.crc import key_slot

from coordinator.errors import StoreDown, StoreError
from coordinator.redis.wire import Wire, check_server

_ASK_S = 0.3
"""How long each of several servers may take to name the one to use: time must remain to connect to it."""
_SEVERAL = re.compile(r"(rediss?)\+(sentinel|cluster)")
_SENTINEL_LOGIN = ("sentinel_username", "sentinel_password")
_Wire = TypeVar("_Wire", bound=Wire)
_OF_THE_MASTER = {*_SENTINEL_LOGIN, "username", "password", "db"}
"""Options that are only for the master, not for the sentinels."""
_ENCODED = "percent-encode in a password what is no letter and no digit (# is %23, / is %2F, @ is %40)"


@dataclass(frozen=True, slots=True)
class _Sentinels:
    """The sentinels to ask. Of all that answer, the one with the newest configuration is believed: a sentinel that was
    away for a while still names the old master."""

    asked: list[str]
    server_url: Callable[[str, int], str]
    name: str

    async def find(self, _key: str) -> str:
        """The master's URL."""
        commands = (("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name), ("SENTINEL", "MASTER", self.name))
        told, problems = await _ask(self.asked, *commands)
        if not told:
            raise StoreDown(f"no sentinel names a master {self.name!r} ({problems})")
        _, ((host, port), _) = max(told, key=lambda answer: _config_epoch(answer[1][1]))
        return self.server_url(host.decode(), int(port))

    async def check(self, wire: Wire, _key: str) -> None:
        """Raises StoreDown if the server is no master: it, or the sentinels, may not have noticed a failover yet."""
        role, *_ = await wire.send("ROLE")
        if role != b"master":
            raise StoreDown(f"the sentinels name a server whose role is {role.decode()}")


@dataclass(frozen=True, slots=True)
class _Cluster:
    asked: list[str]
    server_url: Callable[[str, int], str]

    async def find(self, key: str) -> str:
        """The URL of the node that has the key's slot."""
        told, problems = await _ask(self.asked, ("CLUSTER", "SLOTS"))
        slot = key_slot(key.encode())
        for url, (ranges,) in told:
            for first, last, (host, port, *_), *_ in ranges:
                if first <= slot <= last:
                    return self.server_url((host or b"").decode().strip("?") or urlsplit(url).hostname or "", port)
        raise StoreDown(f"no node of the cluster has slot {slot}" + (f" ({problems})" if problems else ""))

    async def check(self, wire: Wire, key: str) -> None:
        """Raises StoreError if the slot is moving away: asked for a missing key, the node then names another one."""
        await wire.send("EXISTS", key)


def is_cluster(url: str) -> bool:
    """Whether pools may be on different servers."""
    return url.partition("://")[0].lower().endswith("+cluster")


async def connect(url: str, key: str, connect_s: float, on_broken: Callable[[StoreError], None]) -> Wire:
    """A connection to the server that can write `key`, within `connect_s` seconds; else StoreDown."""
    return await connect_as(Wire, url, key, connect_s, on_broken)


async def connect_as(
    kind: type[_Wire], url: str, key: str, connect_s: float, on_broken: Callable[[StoreError], None]
) -> _Wire:
    """Like `connect`, with a subclass of Wire."""
    group = _parse(url)
    if group is None:
        return await kind.open(url, connect_s, on_broken)
    try:
        async with asyncio.timeout(connect_s):
            wire = await kind.open(await group.find(key), connect_s, on_broken)
            try:
                await group.check(wire, key)
            except BaseException:
                await wire.close("gave up connecting")
                raise
            return wire
    except TimeoutError:
        raise StoreDown(f"cannot connect to Redis: no answer within {connect_s:g} s") from None


async def _ask(urls: list[str], *commands: tuple[str, ...]) -> tuple[list[tuple[str, list[Any]]], str]:
    """The answers of each server that answers, with its URL; and in words, why the others did not."""
    answers = await asyncio.gather(*(_ask_one(url, commands) for url in urls), return_exceptions=True)
    told, problems = [], []
    for url, answer in zip(urls, answers, strict=True):
        if isinstance(answer, StoreError | TimeoutError):
            problems.append(f"{urlsplit(url).netloc.rpartition('@')[2]}: {answer or 'no answer'}")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            told.append((url, answer))
    return told, "; ".join(problems)


async def _ask_one(url: str, commands: tuple[tuple[str, ...], ...]) -> list[Any]:
    wire = await Wire.open(url, _ASK_S, lambda _error: None)
    try:
        async with asyncio.timeout(_ASK_S):
            return await asyncio.gather(*(wire.send(*command) for command in commands))
    finally:
        await wire.close()


def _config_epoch(about_master: list[bytes]) -> int:
    return int(dict(zip(about_master[::2], about_master[1::2], strict=True))[b"config-epoch"])


# -- URLs ----------------------------------------------------------------------------------------------------------


def check_url(url: str) -> None:
    """Raises StoreDown for a URL that names no store; the message says how to write it."""
    group = _parse(url)
    for server in [url] if group is None else [*group.asked, group.server_url("host", 6379)]:
        check_server(server)


def _parse(url: str) -> _Sentinels | _Cluster | None:
    """The servers to ask; None if the URL names the server itself."""
    parts = _split(url)
    several = _SEVERAL.fullmatch(parts.scheme)
    if several is not None:
        return _cluster(several[1], parts) if several[2] == "cluster" else _sentinels(several[1], parts)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise StoreDown(
            "must start with redis://, rediss:// (TLS), unix:// (a socket's path), redis+sentinel:// or redis+cluster://"
        )
    if parts.scheme != "unix":
        _host(parts.netloc.rpartition("@")[2], 6379)
    elif not parts.path:
        raise StoreDown("names no server; write for example unix:///run/redis.sock")
    return None


def _cluster(scheme: str, parts: SplitResult) -> _Cluster:
    login, _, hosts = parts.netloc.rpartition("@")
    if parts.path not in ("", "/", "/0"):
        raise StoreDown(f"a Redis Cluster has no databases; leave {parts.path} out")
    node_url = partial(_url, scheme, login, "", parts.query)
    return _Cluster([node_url(*_host(host, 6379)) for host in hosts.split(",")], node_url)


def _sentinels(scheme: str, parts: SplitResult) -> _Sentinels:
    login, _, hosts = parts.netloc.rpartition("@")
    name, _, database = parts.path.strip("/").partition("/")
    if not name or not re.fullmatch(r"\d*", database):
        raise StoreDown(
            "names no master; write what the sentinels call it behind them, and a database's number where it is not 0: "
            "redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/mymaster/0"
        )
    options = parse_qsl(parts.query)
    own = {option: quote(value, safe="") for option, value in options if option in _SENTINEL_LOGIN}
    own_login = ":".join(own.get(option, "") for option in _SENTINEL_LOGIN) if own else ""
    own_query = urlencode([option for option in options if option[0] not in _OF_THE_MASTER])
    query = urlencode([option for option in options if option[0] not in _SENTINEL_LOGIN])
    asked = [_url(scheme, own_login, "", own_query, *_host(host, 26379)) for host in hosts.split(",")]
    return _Sentinels(asked, partial(_url, scheme, login, database, query), name)


def split(url: str) -> SplitResult:
    """`urlsplit` for several hosts: since CVE-2025-0938 Python's allows brackets around the first one only.

    Raises ValueError if the text is no URL.
    """
    scheme, slashes, rest = url.partition("://")
    netloc = re.split("[/?#]", rest, maxsplit=1)[0]
    login, at, hosts = netloc.rpartition("@")
    if "," not in hosts:
        return urlsplit(url)
    return urlsplit(f"{scheme}{slashes}{login}{at}hosts{rest[len(netloc) :]}")._replace(netloc=netloc)


def _split(url: str) -> SplitResult:
    """Its errors never quote the URL: it may hold a password."""
    try:
        parts = split(url)
    except ValueError:
        raise StoreDown(f"is no URL: {_ENCODED}") from None
    # Part of such a password would be taken for the host, and be written to a log.
    stray = parts.netloc.partition("@")[2] if parts.scheme == "unix" else parts.netloc.partition("@")[2] + parts.path
    if "#" in url or "@" in stray:
        raise StoreDown(f"has a # or an @ too many: {_ENCODED}")
    return parts


def _host(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, default_port if parts.port is None else parts.port
    except ValueError:
        host, port = None, 0
    if not host or not port or "," in text:
        raise StoreDown("names no server; write host:port, for example redis://127.0.0.1:6379/0")
    return host, port


def _url(scheme: str, login: str, database: str, query: str, host: str, port: int) -> str:
    at = f"{login}@" if login else ""
    return f"{scheme}://{at}{f'[{host}]' if ':' in host else host}:{port}/{database}{'?' if query else ''}{query}"
