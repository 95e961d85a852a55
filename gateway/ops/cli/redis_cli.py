"""`kvgate redis-cli`: commands to the cluster's Redis, where no redis-cli is installed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.ops.cli.options import DEFAULT_STATE_DIR, OF_CLUSTER, StateDir
from gateway.ops.cli.printable import printable_lines
from gateway.ops.errors import CommandError

if TYPE_CHECKING:
    from coordinator.redis.wire import Wire

_ANSWERS_S = 10.0
_NEVER_END = ("monitor", "subscribe", "psubscribe", "ssubscribe", "hello", "sync", "psync")
"""After these, a server sends what is no answer, or answers in another protocol."""


def redis_cli(
    command: Annotated[list[str] | None, typer.Argument(metavar="COMMAND")] = None,
    scan: Annotated[bool, typer.Option("--scan", help="Print the names of keys, instead of a command.")] = False,
    pattern: Annotated[str, typer.Option(metavar="GLOB", help="With --scan: only these keys.")] = "*",
    redis_url: Annotated[
        str | None,
        typer.Option("--redis-url", "-u", metavar="URL", help="The Redis to ask.", show_default=OF_CLUSTER),
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Send a command to the cluster's Redis, and print its answer as redis-cli does in a pipe.

    It needs no redis-cli, and finds the embedded Redis of kvgate up by itself; of a
    Redis with sentinels the master. A Redis Cluster has several servers: for that,
    use redis-cli -c. What would move the cursor or change colours in a terminal is
    printed as a question mark.

    \b
    Examples:
      kvgate redis-cli --scan --pattern 'kvgate:*'
      kvgate redis-cli hgetall KEY       (coordinator/README.md lists the keys)
      kvgate redis-cli -u redis://redis:6379 info memory
    """
    if scan == bool(command):
        raise CommandError("give a command, such as `info memory`, or --scan")
    if command and command[0].lower() in _NEVER_END:
        raise CommandError(f"{command[0]} needs redis-cli itself (apt install redis-tools)")
    from coordinator.redis.address import is_cluster
    from gateway.ops.local.state_dir import read_cluster

    url = redis_url or read_cluster(state_dir).redis_url
    if is_cluster(url):
        raise CommandError("a Redis Cluster has several servers, and this asks one: use redis-cli -c")
    asyncio.run(_run(url, command, pattern))


async def _run(url: str, command: list[str] | None, pattern: str) -> None:
    from coordinator.errors import StoreError
    from coordinator.keys import pools_key
    from coordinator.redis.address import connect

    try:
        wire = await connect(url, pools_key(), _ANSWERS_S, lambda _: None)
        try:
            answers = _scanned(wire, pattern) if command is None else _answer(wire, command)
            async for answer in answers:
                sys.stdout.writelines(f"{line}\n" for line in lines_of(answer))
        finally:
            await wire.close()
    except TimeoutError:
        raise CommandError(f"Redis does not answer within {_ANSWERS_S:g} s") from None
    except (StoreError, ValueError) as error:
        raise CommandError(str(error)) from None


async def _answer(wire: Wire, command: list[str]) -> AsyncIterator[Any]:
    async with asyncio.timeout(_ANSWERS_S):
        yield await wire.send(*command)


async def _scanned(wire: Wire, pattern: str) -> AsyncIterator[Any]:
    """The keys, a piece at a time."""
    cursor: bytes | str = "0"
    while True:
        async with asyncio.timeout(_ANSWERS_S):
            cursor, keys = await wire.send("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        if keys:
            yield keys
        if cursor == b"0":
            return


def lines_of(answer: Any) -> Iterator[str]:
    """The lines of an answer. Nothing, and an empty list, are an empty line."""
    if isinstance(answer, list) and answer:
        for each in answer:
            yield from lines_of(each)
    elif isinstance(answer, bytes):
        yield printable_lines(answer.decode("utf-8", "replace").removesuffix("\r\n").replace("\r\n", "\n"))
    else:
        yield "" if answer is None or answer == [] else str(answer)
