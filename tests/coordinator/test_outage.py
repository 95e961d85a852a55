"""A process without Redis warns at once, repeats the warning now and then, and reports when Redis is back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from coordinator.agent.agent_store import Registration
from coordinator.agent.engine_session import EngineSession
from coordinator.agent.http_engine import EngineSnapshot
from coordinator.redis import outage
from coordinator.redis.outage import SAY_AGAIN_S, Outage
from coordinator.store import Store, StoreOptions
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis

PASSWORD = "a-secret"


def test_it_is_said_at_once_and_then_each_half_minute_with_for_how_long() -> None:
    told = Outage()
    said = {now_s: away_s for now_s in range(100, 200) if (away_s := told.failed(now_s)) is not None}
    assert SAY_AGAIN_S == 30
    assert said == {100: 0, 130: 30, 160: 60, 190: 90}
    assert told.ended(200) == 100


def test_the_end_is_said_once_and_the_next_time_begins_anew() -> None:
    told = Outage()
    assert told.ended(5) is None
    told.failed(10)
    assert (told.ended(12), told.ended(13)) == (2, None)
    assert told.failed(14) == 0


class Engine:
    """An engine that never restarts and publishes no events."""

    async def look(self) -> EngineSnapshot:
        return EngineSnapshot("m", "http://r0.test:8000", "18bcfe56800", 1600, 16, (0, 32), "", "")

    async def detokenize(self, _tokens: Sequence[int]) -> str | None:
        return None


async def agent(url: str) -> None:
    engine = Engine()
    await EngineSession(Registration(url, "r0", "agent0"), "r0", await engine.look(), engine).run()


async def gateway(url: str) -> None:
    store = Store(StoreOptions(url, budget_s=1.0), "gw0")
    store.pool("m")
    await store.run()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis(options=("--requirepass", PASSWORD)) as running:
        yield running


@pytest.mark.parametrize("process", [agent, gateway])
async def test_a_process_without_redis_goes_on_warning_until_it_is_back(
    process: Callable[[str], Coroutine[Any, Any, None]], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "SAY_AGAIN_S", 0.3)
    server.kill()
    with capture_logs() as logs:

        def warnings() -> list[dict[str, Any]]:
            return [dict(each) for each in logs if each["log_level"] == "warning" and "away_s" in each]

        def ends() -> list[dict[str, Any]]:
            return [dict(each) for each in logs if each["log_level"] == "info" and "away_s" in each]

        running = asyncio.ensure_future(process(f"redis://:{PASSWORD}@127.0.0.1:{server.port}/0"))
        try:
            await eventually(lambda: len(warnings()) >= 2)
            assert warnings()[0]["away_s"] == 0
            assert not ends()
            server.start()
            await eventually(ends)
            before = len(warnings())
            server.kill()
            await eventually(lambda: len(warnings()) > before)
            assert warnings()[before]["away_s"] == 0
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert all(each["reason"] for each in warnings())
    assert PASSWORD not in str(logs)
