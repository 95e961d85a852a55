"""Several gateways' books of records on one real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import redis.asyncio as redis

from coordinator.errors import StoreDown
from coordinator.keys import audit_key, records_key
from coordinator.records import AuditNote, RecordStore
from coordinator.store import Store, StoreOptions
from gateway.records import record_book
from gateway.records.record import Record, Signer
from gateway.records.record_book import ChangedMeanwhileError, RecordBook
from tests.coordinator.stage import running
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis

SECRET, KEY = "0123456789abcdef", records_key()
NOTE = AuditNote("root", "create", "batch", "ops")
FIELD = "key/k-1"


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[redis.Redis]:
    async with redis.Redis.from_url(redis_server.url, protocol=2) as client:
        yield client
        await client.delete(records_key(), audit_key())


@asynccontextmanager
async def book(server: RedisServer, secret: str = SECRET, other: str | None = None) -> AsyncIterator[RecordBook]:
    """The book of a gateway that has read the store."""
    async with running(Store(StoreOptions(server.url, 5.0), "gw0")) as store, asyncio.TaskGroup() as tasks:
        book = RecordBook(store, Signer(secret, "", other), "")
        task = tasks.create_task(book.run())
        await book.first_exchange()
        yield book
        task.cancel()


def signed(book: RecordBook, version: int = 1, *, field: str = FIELD, is_removed: bool = False, **facts: int) -> Record:
    assert book.signer is not None
    return book.signer.write(field, version, {"name": "batch", **facts}, is_removed=is_removed)


async def knows(book: RecordBook, record: Record) -> None:
    """Within a second, like all that operators change."""
    await eventually(lambda: book.find(record.field) == record, within_s=1.0)


async def test_what_one_gateway_writes_all_know_within_a_second_and_the_audit_tells(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with book(redis_server) as one, book(redis_server) as other:
        made = signed(one)
        await one.put([made], NOTE)
        assert one.find(FIELD) == made
        await knows(other, made)
        removed = signed(other, 2, is_removed=True)
        await other.remove(removed, AuditNote("root", "revoke", "batch", "ops"))
        await knows(one, removed)
        told = [entry.note for entry in await one.audit(10)]
        assert told == [AuditNote("root", "revoke", "batch", "ops"), NOTE]
        assert (await one.audit(1))[0].at_ms > 1_600_000_000_000


async def test_of_two_changes_of_one_version_the_later_one_is_refused(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with book(redis_server) as one, book(redis_server) as other:
        await one.put([signed(one)], NOTE)
        await knows(other, signed(one))
        results = await asyncio.gather(
            one.put([signed(one, 2, limit=1)], NOTE), other.put([signed(one, 2, limit=2)], NOTE), return_exceptions=True
        )
        assert sorted(map(repr, results)) == ["ChangedMeanwhileError()", "None"]
        kept = one.find(FIELD) if results[0] is None else other.find(FIELD)
        assert kept is not None
        await knows(one, kept)
        await knows(other, kept)


async def test_a_change_that_is_heard_of_before_the_own_one_is_written_is_not_overwritten(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with book(redis_server) as one, book(redis_server) as other:
        await one.put([signed(one)], NOTE)
        await knows(other, signed(one))
        late = signed(other, 2, limit=2)
        await one.remove(signed(one, 2, is_removed=True), NOTE)
        await knows(other, signed(one, 2, is_removed=True))
        with pytest.raises(ChangedMeanwhileError):
            await other.put([late], NOTE)
        assert await client.hget(KEY, FIELD) == signed(one, 2, is_removed=True).text


async def test_several_records_are_written_together_or_not_at_all(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with book(redis_server) as one, book(redis_server) as other:
        await other.put([signed(other)], NOTE)
        with pytest.raises(ChangedMeanwhileError):  # it does not know the first one yet, or it does and has another
            await one.put([signed(one, limit=3), signed(one, field="key/k-2")], NOTE)
        assert await client.hget(KEY, "key/k-2") is None


async def test_an_emptied_store_gets_everything_back_and_an_old_backup_undoes_no_removal(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with book(redis_server) as one:
        live, removed = signed(one), signed(one, 2, is_removed=True)
        await one.put([live], NOTE)
        backup = await client.hgetall(KEY)
        await one.remove(removed, NOTE)
        await client.delete(KEY)
        await eventually(lambda: client.hexists(KEY, FIELD))
        await client.delete(KEY)
        await client.hset(KEY, mapping=backup)
        await eventually(lambda: has(client, removed))
        assert one.find(FIELD) == removed
        async with book(redis_server) as other:
            assert other.find(FIELD) == removed


async def has(client: redis.Redis, record: Record) -> bool:
    return bool(await client.hget(KEY, record.field) == record.text)


async def test_a_record_of_somebody_else_is_ignored_named_and_never_in_the_place_of_a_good_one(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    forged = Signer("another-secret-0123", "").write(FIELD, 9, {"name": "evil"})
    async with book(redis_server) as one:
        await client.hset(KEY, mapping={"key/k-9": forged.text, "#": 1})
        await eventually(lambda: list(one.ignored) == ["key/k-9"])
        assert one.find("key/k-9") is None
        good = signed(one)
        await one.put([good], NOTE)
        await client.hset(KEY, mapping={FIELD: forged.text, "#": 2})
        await eventually(lambda: has(client, good))
        assert one.find(FIELD) == good
        removed = signed(one, 2, is_removed=True)
        await client.hset(KEY, mapping={FIELD: forged.text, "#": 3})
        await one.remove(removed, NOTE)  # a version that is ahead holds up no revocation
        assert await has(client, removed)


async def test_gateways_with_different_secrets_do_not_go_on_replacing_each_others_records(
    redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_book, "_READ_S", 0.1)
    async with book(redis_server) as one, book(redis_server, "another-secret-0123") as other:
        await other.put([signed(other)], NOTE)
        await eventually(lambda: one.ignored)

        async def has_learned_its_own() -> bool:
            await client.hset(KEY, FIELD, signed(one).text)
            return one.find(FIELD) is not None

        await eventually(has_learned_its_own)
        for _ in range(3):  # each replaces the other's text once
            changes = await client.hget(KEY, "#")
            await asyncio.sleep(1.0)  # nothing else tells that nothing happens
            if await client.hget(KEY, "#") == changes:
                return
        raise AssertionError(f"still replacing after {changes!r}")


async def test_what_somebody_deletes_by_hand_comes_back(
    redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_book, "_READ_S", 0.1)
    async with book(redis_server) as one:
        made = signed(one)
        await one.put([made], NOTE)
        await client.hdel(KEY, FIELD)
        await eventually(lambda: has(client, made))


async def test_what_expired_long_ago_is_removed_everywhere(redis_server: RedisServer, client: redis.Redis) -> None:
    async with book(redis_server) as one:
        await one.put([signed(one, kept_until_ms=1000)], NOTE)
        await eventually(lambda: one.find(FIELD) is None)
        await eventually(lambda: gone(client))


async def gone(client: redis.Redis) -> bool:
    return not await client.hexists(KEY, FIELD)


async def test_more_fields_than_gateways_write_are_not_read(
    redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_book, "_MOST_STORED", 3)
    async with book(redis_server) as one:
        made = signed(one)
        await one.put([made], NOTE)
        await client.hset(KEY, mapping={f"key/{n}": "x" for n in range(5)} | {"#": 1})
        await eventually(lambda: "*" in one.ignored)
        assert one.find(FIELD) == made


async def test_a_store_of_another_kind_is_written_anew(redis_server: RedisServer, client: redis.Redis) -> None:
    async with book(redis_server) as one:
        made = signed(one)
        await one.put([made], NOTE)
        await client.delete(KEY, audit_key())
        await client.set(KEY, "x")
        await client.set(audit_key(), "x")
        await one.put([signed(one, field="key/k-2")], NOTE)
        await eventually(lambda: has(client, made))


async def test_while_the_store_is_away_what_is_known_counts_and_changes_are_refused(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    store = Store(StoreOptions(redis_server.url, 5.0), "gw0")
    async with book(redis_server) as one:
        made = signed(one)
        await one.put([made], NOTE)
        kept, one._store = one._store, RecordStore(store, "")  # this one never connects
        with pytest.raises(StoreDown):
            await one.put([signed(one, 2)], NOTE)
        assert one.find(FIELD) == made
        removed = signed(one, 2, is_removed=True)
        with pytest.raises(StoreDown):
            await one.remove(removed, NOTE)
        assert one.find(FIELD) == removed
        one._store = kept
        await eventually(lambda: has(client, removed))


async def test_without_a_secret_there_is_nothing_to_read() -> None:
    none = RecordBook(Store(StoreOptions("redis://127.0.0.1:1", 5.0), "gw0"), None, "")
    await none.run()
    await none.first_exchange()
    assert none.has_read


async def test_gateways_with_the_two_secrets_in_either_order_know_the_same_and_change_it(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    new = "another-secret-0123"
    async with book(redis_server, SECRET, new) as before, book(redis_server, new, SECRET) as after:
        for writer, reader, version in ((before, after, 1), (after, before, 2), (before, after, 3)):
            await writer.put([signed(writer, version)], NOTE)
            await knows(reader, signed(reader, version))
        await after.remove(signed(after, 4, is_removed=True), NOTE)
        await knows(before, signed(before, 4, is_removed=True))
        marks = [await client.hget(KEY, "#")]
        for _ in range(10):
            await asyncio.sleep(0.2)
            marks.append(await client.hget(KEY, "#"))
        assert len(set(marks)) <= 3, "they work against each other"
    async with book(redis_server, new, SECRET) as after:
        await eventually(lambda: has(client, signed(after, 4, is_removed=True)))
    async with book(redis_server, new) as last:
        assert last.find(FIELD) == signed(last, 4, is_removed=True)
        assert last.ignored == {}
