"""The feed over real sockets: the engine dies, and another one takes its place."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from coordinator.agent.batch_sequence import Item, Lost, Received, Restarted
from coordinator.agent.feed import Feed
from gateway.tasks import Tasks
from tests.coordinator.agent.publisher import Publisher
from tests.coordinator.agent.reader import PATIENT_S, SOON_S, Read
from tests.polling import eventually


async def test_a_restarted_engine_is_noticed_while_idle(engine: Publisher, read: Read) -> None:
    before = await engine.publish(3)
    reader = read(engine, idle_s=SOON_S, replay_timeout_s=PATIENT_S)
    await reader.reads([*before])
    await engine.restart()
    await reader.reads([*before, Restarted()])
    after = await engine.publish(2)
    await reader.reads([*before, Restarted(), *after])


@pytest.mark.parametrize("unseen", [0, 1, 3, 5])
async def test_a_restarted_engine_is_noticed_by_the_first_batch_whatever_its_number(
    engine: Publisher, read: Read, unseen: int
) -> None:
    before = await engine.publish(3)
    reader = read(engine)
    await reader.reads([*before])
    await engine.subscribed.wait()
    await engine.restart()
    after = await engine.publish(unseen, is_dropped=True)
    await engine.subscribed.wait()
    after += await engine.publish(2)
    await reader.reads([*before, Restarted(), *after])


async def test_a_restarted_engine_is_noticed_without_replays(engine: Publisher, read: Read) -> None:
    reader = read(engine, replays=False)
    await engine.subscribed.wait()
    before = await engine.publish(3)
    await reader.reads([*before])
    await engine.restart()
    await engine.subscribed.wait()
    await engine.publish(is_dropped=True)
    after = await engine.publish(3)
    await reader.reads([*before, Restarted(), Lost(0, 1), *after])


async def test_an_engine_that_comes_after_the_feed_is_waited_for(engine: Publisher, read: Read) -> None:
    await engine.crash()
    reader = read(engine, idle_s=SOON_S, replay_timeout_s=SOON_S)
    await eventually(lambda: reader.feed._replay_deadline_s is None)  # the feed gave up at least one replay
    await engine.restart()
    published = await engine.publish(3)
    await reader.reads([*published])


@pytest.mark.parametrize("count", [0, 3])
async def test_what_a_slow_reader_had_not_read_of_an_engine_that_died_is_not_the_next_ones(
    engine: Publisher, read: Read, count: int
) -> None:
    before = await engine.publish(3)
    feed = Feed(engine.events_endpoint, engine.replay_endpoint, idle_s=SOON_S, replay_timeout_s=PATIENT_S)
    async with aclosing(feed.items()) as items:
        assert [await anext(items) for _ in before] == before
        await engine.subscribed.wait()
        fast = read(engine)
        await eventually(lambda: len(engine.asked) > 1)
        unread = await engine.publish(20)
        await fast.reads([*before, *unread])  # so the engine has sent them all
        await fast.close()
        await engine.restart()
        after = await engine.publish(count, is_dropped=True)
        await engine.subscribed.wait()
        while (item := await anext(items)) != Restarted():
            assert isinstance(item, Received)  # the earlier replay may contain some of them
        rest: list[Item] = []

        async def read_on() -> None:
            async for item in items:
                rest.append(item)  # noqa: PERF401 - the feed never ends

        tasks = Tasks()
        tasks.spawn(read_on(), "reader")
        after += await engine.publish(2, is_dropped=True)
        await eventually(lambda: len(rest) >= len(after))
        asked = len(engine.asked)
        await eventually(lambda: len(engine.asked) > asked + 5)
        await tasks.close()
    assert rest == after
