"""Which file's keys count. (tests/cluster/test_file_keys.py shows it on gateways' processes.)"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.keys import audit_key, records_key
from coordinator.records import AuditNote
from coordinator.store import Store, StoreOptions
from gateway.records import file_keys
from gateway.records.file_keys import FIELD, FileKeys
from gateway.records.record import Signer
from gateway.records.record_book import RecordBook
from gateway.settings.gateway_settings import ApiKey
from gateway.settings.queue_settings import AccountLimitSettings
from tests.coordinator.stage import running
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis

SECRET, NEXT_SECRET = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(autouse=True)
async def _empty(redis_server: RedisServer) -> AsyncIterator[None]:
    yield
    async with redis.Redis.from_url(redis_server.url) as client:
        await client.delete(records_key(), audit_key())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_keys, "_LOOK_S", 0.05)
    monkeypatch.setattr(file_keys, "_SAY_S", 0.2)
    monkeypatch.setattr(file_keys, "_UNUSED_S", 1.0)


def configured(*names: str) -> list[ApiKey]:
    return [ApiKey(name=name, sha256=name.encode().hex().ljust(64, "0"), tenant="team") for name in names]


@asynccontextmanager
async def gateway(server: RedisServer, *names: str, secrets: Sequence[str] = (SECRET,)) -> AsyncIterator[FileKeys]:
    """One gateway's side, with these keys in its file."""
    secret, other = (*secrets, None)[:2]
    assert secret is not None
    async with running(Store(StoreOptions(server.url, 5.0), "gw0")) as store, asyncio.TaskGroup() as tasks:
        book = RecordBook(store, Signer(secret, "", other), "")
        files = FileKeys(book)
        files.use(configured(*names))
        running_tasks = [tasks.create_task(book.run())]
        await book.first_exchange()
        running_tasks.append(tasks.create_task(files.run()))
        yield files
        for task in running_tasks:
            task.cancel()


async def use(files: FileKeys, *names: str) -> None:
    """Another file with these keys is read."""
    files.use(configured(*names))
    await asyncio.sleep(0)


def others(files: FileKeys) -> list[str] | None:
    """The names of the keys that count, if they are not those of its own file."""
    return None if files.others is None else [key.name for key in files.others]


async def test_a_file_of_before_counts_again_when_no_gateway_uses_the_newest(redis_server: RedisServer) -> None:
    async with gateway(redis_server, "old") as one, AsyncExitStack() as rolled_out:
        other = await rolled_out.enter_async_context(gateway(redis_server, "new"))
        await eventually(lambda: others(one) == ["new"])
        await asyncio.sleep(1.5)  # longer than a gateway is waited for
        assert (others(one), one.is_older, other.is_older) == (["new"], True, False)
        await rolled_out.aclose()
        await eventually(lambda: not one.is_older and others(one) is None)


async def test_a_gateway_that_is_late_brings_no_file_of_before_back(redis_server: RedisServer) -> None:
    async with gateway(redis_server, "first") as one, gateway(redis_server, "first") as late:
        for name in ("second", "third"):
            await use(one, name)
        await eventually(lambda: others(late) == ["third"])
        await use(late, "second")
        assert late.is_older
        await use(late, "third")
        assert not late.is_older
        await use(one, "second")  # it had the newest
        assert not one.is_older
        await eventually(lambda: others(late) == ["second"])


async def test_a_file_of_before_stays_one_of_before_when_the_secret_is_replaced(redis_server: RedisServer) -> None:
    async def restarted(stack: AsyncExitStack, *secrets: str) -> tuple[FileKeys, FileKeys]:
        await stack.aclose()
        late = await stack.enter_async_context(gateway(redis_server, "old", secrets=secrets))
        return late, await stack.enter_async_context(gateway(redis_server, "new", secrets=secrets))

    async with AsyncExitStack() as stack:
        late, newest = await restarted(stack, SECRET)
        await eventually(lambda: (others(late), others(newest)) == (["new"], None))
        late, newest = await restarted(stack, NEXT_SECRET, SECRET)

        def is_known_by_its_next_names() -> bool:
            known = [each._newest.facts if each._newest else {"name": "", "before": []} for each in (late, newest)]
            return all(facts["name"] == newest._names[0] and late._names[0] in facts["before"] for facts in known)

        await eventually(is_known_by_its_next_names)
        late, newest = await restarted(stack, NEXT_SECRET)
        await asyncio.sleep(0.3)
        assert (late.is_older, others(late), newest.is_older) == (True, ["new"], False)


async def test_of_two_files_soon_after_each_other_the_second_one_counts_at_its_own_moment(
    redis_server: RedisServer,
) -> None:
    """A gateway that hears of the second one a little later would otherwise have other keys meanwhile."""
    async with gateway(redis_server, "first") as one, gateway(redis_server, "first") as two:
        await eventually(lambda: one._newest is not None and one._newest == two._newest)
        await use(one, "second")
        await asyncio.sleep(0.5)
        await use(one, "third")
        assert one._newest is not None
        seen = []
        while time.time() * 1000 < one._newest.facts["from_ms"] + 500:
            seen.append((others(two), time.time() * 1000 < one._newest.facts["from_ms"]))
            await asyncio.sleep(0.01)
        assert (["second"], True) in seen
        assert (["third"], True) not in seen
        assert others(two) == ["third"]


async def test_of_two_files_that_are_read_at_once_all_choose_the_same_one(redis_server: RedisServer) -> None:
    async with gateway(redis_server, "first") as one, gateway(redis_server, "first") as two:
        await eventually(lambda: one._newest is not None and one._newest == two._newest)
        one.use(configured("a"))
        two.use(configured("b"))
        await eventually(lambda: (others(one), others(two)) in ((None, ["a"]), (["b"], None)))


async def test_ten_thousand_keys_fit_into_a_record_and_its_reader_cannot_test_guesses(
    redis_server: RedisServer,
) -> None:
    names = [f"key-{number}" for number in range(10_000)]
    async with gateway(redis_server, *names) as one, gateway(redis_server, "other") as two:
        await eventually(lambda: others(one) == ["other"])
        one.use(configured(*names, "more"))
        await eventually(lambda: others(two) == [*names, "more"])
        assert two.others is not None
        assert configured("more")[0].sha256 not in str(two.others)
    async with redis.Redis.from_url(redis_server.url) as client:
        assert await client.hstrlen(records_key(), FIELD) < 2_000_000


async def test_another_gateway_reads_ten_thousand_keys_in_pieces(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step takes some ms: requests run in between."""
    read, pieces = file_keys._read, list[int]()

    def noted(told: list[dict[str, Any]]) -> list[ApiKey]:
        pieces.append(len(told))
        return read(told)

    monkeypatch.setattr(file_keys, "_read", noted)
    async with gateway(redis_server, "first") as one, gateway(redis_server, "first") as two:
        await eventually(lambda: one._newest is not None and one._newest == two._newest)
        one.use(configured(*map(str, range(10_000))))
        await eventually(lambda: len(two.others or ()) == 10_000)
    assert max(pieces) == 1000


async def test_what_only_a_later_version_knows_of_a_key_is_left_out(redis_server: RedisServer) -> None:
    async with gateway(redis_server, "one") as files:
        await eventually(lambda: files._newest is not None)
        record = files._newest
        assert record is not None
        key = record.facts["keys"][0]
        told = [
            {**key, "name": "limited", "later": 1, "limits": {"concurrency": 2, "later": 3}},
            {**key, "name": "unreadable", "models": 7},
        ]
        assert files._book.signer is not None
        facts = {**record.facts, "name": "x", "before": [record.facts["name"]], "keys": told}
        newer = files._book.signer.write(FIELD, record.version + 1, facts)
        await files._book.put([newer], AuditNote())
        await eventually(lambda: others(files) == ["limited"])
        assert files.others is not None
        assert files.others[0].limits == AccountLimitSettings(concurrency=2)
