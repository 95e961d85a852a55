"""No number of gateways spends more than a budget, whatever fails."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import httpx
import pytest

from bench.cluster import running_cluster
from bench.faults.stepped_clock import OFFSET_KEY
from gateway.ops.cli.explain import reasons
from tests.chaos.stage import CONFIG, REPLICA_ARGUMENTS
from tests.chaos.tenant_stage import TenantStage, api_keys
from tests.chaos.test_clock_steps import STEPPED, options_of
from tests.cluster.clients import held_stream, records_of
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis

GATEWAYS = 4
TOKENS = 2
COST = TOKENS * 10_000
"""Of a request, in nanos: only its answer has a price."""
FITS = 10
"""So many requests fit into a budget."""
SLICED = ("sliced", "flushed", "ending")
TENANTS = ("exact", "killed", "emptied", "away", "gone", "full", "rich", "timed", "chaos", *SLICED)
MONEY = COST * FITS / 1e9
PARTS = {"rich": 1000, "chaos": 120, "sliced": 1000, "flushed": 1000, "ending": 120}
CLIENTS = 24
_SLOW_S = 0.25
CONFIG_OF_BUDGETS: dict[str, Any] = CONFIG | {
    "billing": {"prices": [{"model": "sim", "output_per_mtok": 10.0}]},
    "tenants": [{"name": name, "budgets": [{"per": "month", "money": MONEY * PARTS.get(name, 1)}]} for name in TENANTS],
    "security": {"share_cache": True, "api_keys": api_keys(TENANTS, admins=TENANTS)},
}


class BudgetStage(TenantStage):
    """A cluster of four gateways, whose tenants have budgets."""

    async def spent(self, tenant: str) -> tuple[int, int]:
        """What is settled, and held, in nanos."""
        fields = await self.client.hgetall(self.keys.spending)
        found = {field.split(" ")[0]: int(value) for field, value in fields.items() if field.endswith(f"/{tenant}")}
        return found.get("settled", 0), found.get("held", 0)

    async def settles(self, tenant: str, nanos: int, held: int = 0) -> None:
        async def has_settled() -> bool:
            return await self.spent(tenant) == (nanos, held)

        await eventually(has_settled)

    async def asks(self, tenant: str, count: int, **fields: Any) -> list[httpx.Response]:
        """So many clients at once, at all gateways in turn."""
        asked = {"max_tokens": TOKENS, **fields}
        return await asyncio.gather(*(self.ask(tenant, number % GATEWAYS, **asked) for number in range(count)))

    async def until_exceeded(self, tenant: str) -> int:
        """Asks until the budget is used up. Returns how many requests were served."""
        served = 0
        for number in range(10 * FITS):
            answer = await self.ask(tenant, number % GATEWAYS, max_tokens=TOKENS)
            served += answer.status_code == 200
            if code_of(answer) == "budget_exceeded":
                return served
            if answer.status_code != 200:
                assert code_of(answer) == "budget_reserved", answer.text
                await asyncio.sleep(0.1)
        raise AssertionError("the budget is never used up")

    async def slices(self, tenant: str) -> dict[str, int]:
        """What is held for slices of its budget, by gateway, in nanos."""
        found = {}
        for gateway in await self.ledger.gateways():
            entries = await self.client.hgetall(self.keys.leased(gateway))
            found |= {
                gateway.partition(".")[0]: int(entry.split(" ")[4])
                for name, entry in entries.items()
                if name.startswith("slice ") and name.endswith(f"/{tenant}")
            }
        return found

    async def all_have_slices(self, tenant: str) -> bool:
        return len(await self.slices(tenant)) == GATEWAYS


class Spenders:
    """Clients of a tenant, who ask all gateways one request after another."""

    def __init__(self, stage: BudgetStage, tenant: str) -> None:
        self.stage, self.tenant = stage, tenant
        self.codes = Counter[str]()
        self.in_flight = self.most_left = 0
        """How many requests more the budget had paid for when one was refused."""
        self.pause_s = _SLOW_S
        self.is_over = False

    @property
    def served(self) -> int:
        return self.codes[""]

    async def _spend(self, number: int) -> None:
        while not self.is_over:
            self.in_flight += 1
            try:
                answer = await self.stage.ask(self.tenant, number % GATEWAYS, max_tokens=TOKENS)
                code = code_of(answer)
            except httpx.TransportError:
                code = "cut"
                await asyncio.sleep(0.05)
            self.in_flight -= 1
            self.codes[code] += 1
            if code.startswith("budget"):
                self.most_left = max(self.most_left, FITS * PARTS[self.tenant] - self.served - self.in_flight)
            if code == "budget_exceeded":
                return
            await asyncio.sleep(self.pause_s)

    @asynccontextmanager
    async def spending(self) -> AsyncIterator[None]:
        """Until all gateways have slices, the clients are slow: what a slice asks for grows with their speed."""
        clients = [asyncio.get_running_loop().create_task(self._spend(number)) for number in range(CLIENTS)]
        await eventually(lambda: self.stage.all_have_slices(self.tenant))
        self.pause_s = 0
        yield
        self.is_over = True
        await asyncio.gather(*clients)


def code_of(answer: httpx.Response) -> str:
    return answer.json()["error"]["code"] if answer.status_code != 200 else ""


@pytest.fixture(scope="module")
def budget_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def budget_cluster(budget_redis: RedisServer) -> Iterator[BudgetStage]:
    with running_cluster(
        gateways=GATEWAYS,
        replica_arguments=REPLICA_ARGUMENTS,
        events=False,
        config=CONFIG_OF_BUDGETS,
        redis_url=budget_redis.url,
    ) as cluster:
        yield BudgetStage(cluster, budget_redis)


@pytest.fixture
async def stage(budget_cluster: BudgetStage) -> AsyncIterator[BudgetStage]:
    async with budget_cluster.opened(TENANTS):
        yield budget_cluster


async def test_of_64_clients_at_four_gateways_as_many_are_served_as_the_budget_pays_for(stage: BudgetStage) -> None:
    answers = await stage.asks("exact", 64)
    served = sum(answer.status_code == 200 for answer in answers)
    assert served <= FITS
    codes = Counter(map(code_of, answers))
    assert codes.keys() <= {"", "budget_reserved", "budget_exceeded"}
    served += await stage.until_exceeded("exact")
    assert served == FITS
    await stage.settles("exact", FITS * COST)
    refused = await stage.ask("exact", 1)
    assert (refused.status_code, code_of(refused)) == (429, "budget_exceeded")
    assert refused.headers["x-should-retry"] == "false"
    assert int(refused.headers["retry-after"]) > 0
    assert "monthly budget of your tenant" in refused.text
    await explains(stage, refused.headers["x-request-id"])


async def explains(stage: BudgetStage, request_id: str) -> None:
    """Another gateway tells afterwards which budget has refused a request."""
    found = await records_of(stage.tenants["exact"], stage.urls[2], request_id)
    told = found[0]["over_budget"]
    assert (told["account"], told["per"], told["unit"], told["reserved"]) == ("tenant", "month", "USD", 0)
    assert (told["budget"], told["spent"], told["may_take"]) == (MONEY, MONEY, COST / 1e9)
    assert any(line.startswith("refused by the budget of its tenant per month") for line in reasons(found[0]))


async def test_a_gateway_that_dies_with_requests_in_flight_lets_nobody_spend_more(stage: BudgetStage) -> None:
    async with held_stream(stage.tenants["killed"], stage.urls[3], stage.new_prompt(), 6 * TOKENS):
        assert await stage.spent("killed") == (0, 6 * COST)
        stage.cluster.signal_gateway(3, signal.SIGKILL)

    async def is_reaped() -> bool:
        return await stage.ledger.in_flight("gw3") == 0

    await eventually(is_reaped)
    settled, held = await stage.spent("killed")
    assert held == 0
    assert 0 < settled <= 6 * COST
    stage.cluster.gateway_processes[3].stop()
    stage.cluster.gateway_processes[3].start()
    await eventually(lambda: stage.listens(stage.urls[3]))
    await stage.healed()
    served = await stage.until_exceeded("killed")
    assert served == (FITS * COST - settled) // COST


async def test_a_store_that_is_emptied_gets_what_gateways_have_seen(stage: BudgetStage) -> None:
    answers = await stage.asks("emptied", 6)
    assert [answer.status_code for answer in answers] == [200] * 6
    await stage.settles("emptied", 6 * COST)
    await stage.client.flushdb()
    await stage.settles("emptied", 6 * COST)
    assert await stage.until_exceeded("emptied") == FITS - 6


async def test_without_the_store_gateways_spend_no_more_than_their_parts_and_tell_it_when_it_is_back(
    stage: BudgetStage,
) -> None:
    answers = await stage.asks("away", 4)
    assert [answer.status_code for answer in answers] == [200] * 4
    await stage.settles("away", 4 * COST)
    stage.redis.kill()
    await eventually(stage.has_fallen_back)
    answers = [answer for _ in range(4) for answer in await stage.asks("away", GATEWAYS)]
    served = sum(answer.status_code == 200 for answer in answers)
    assert served <= FITS, "what a gateway saw last may be from before any of these had settled"
    assert served > 0, "how much each sees as left depends on what others held when it looked last"
    assert {code_of(answer) for answer in answers} == {"", "budget_reserved"}
    assert code_of(await stage.ask("gone", 0)) == "budget_reserved", "of which this gateway knows nothing"
    assert (await stage.ask("rich", 0)).status_code == 200, "one request is less than 1 %"
    stage.redis.start()
    await stage.healed()
    await stage.settles("away", (4 + served) * COST)


async def test_a_full_store_counts_budgets_all_the_same(stage: BudgetStage) -> None:
    await stage.client.config_set("maxmemory", "1mb")
    try:
        assert await stage.until_exceeded("full") == FITS
        await stage.settles("full", FITS * COST)
    finally:
        await stage.client.config_set("maxmemory", "0")


async def test_a_gateway_that_dies_with_a_slice_has_spent_no_more_than_that(stage: BudgetStage) -> None:
    spenders = Spenders(stage, "sliced")
    async with spenders.spending():
        stage.cluster.signal_gateway(3, signal.SIGKILL)
        slice_nanos = (await stage.slices("sliced"))["gw3"]

        async def is_reaped() -> bool:
            return not any(gateway.startswith("gw3.") for gateway in await stage.ledger.gateways())

        await eventually(is_reaped)
    stage.cluster.gateway_processes[3].stop()
    stage.cluster.gateway_processes[3].start()
    await eventually(lambda: stage.listens(stage.urls[3]))
    assert spenders.codes.keys() <= {"", "cut"}

    async def holds_nothing() -> bool:
        return (await stage.spent("sliced"))[1] == 0

    await eventually(holds_nothing)
    settled, _ = await stage.spent("sliced")
    assert spenders.served * COST <= settled <= spenders.served * COST + slice_nanos + CLIENTS * COST


async def test_slices_are_held_again_in_a_store_that_is_emptied(stage: BudgetStage) -> None:
    spenders = Spenders(stage, "flushed")
    async with spenders.spending():
        await stage.client.flushdb()
        await eventually(lambda: stage.all_have_slices("flushed"))
    await stage.settles("flushed", spenders.served * COST)
    assert spenders.codes["budget_exceeded"] == 0


async def test_gateways_that_had_slices_spend_a_budget_to_its_end_and_no_further(stage: BudgetStage) -> None:
    spenders = Spenders(stage, "ending")
    async with spenders.spending():
        await eventually(lambda: spenders.codes["budget_exceeded"] == CLIENTS)
    assert spenders.served == FITS * PARTS["ending"]
    assert spenders.most_left <= 1
    await stage.settles("ending", FITS * PARTS["ending"] * COST)


@asynccontextmanager
async def stepped_clock(stage: BudgetStage, month: str) -> AsyncIterator[None]:
    """Runs the gateways on a clock that shows a minute before this month begins."""
    for daemon in stage.cluster.gateway_processes:
        daemon.stop()
        daemon.start(*STEPPED, *options_of(daemon))
    try:
        for url in stage.urls:
            await eventually(lambda url=url: stage.listens(url))
        seconds, _ = await stage.client.time()
        offset_s = datetime.fromisoformat(f"{month}-01T00:00:00+00:00").timestamp() - seconds - 60
        await stage.client.set(OFFSET_KEY, int(offset_s * 1000))
        await stage.healed()
        yield
    finally:
        for daemon in stage.cluster.gateway_processes:
            daemon.stop()
        await stage.client.delete(OFFSET_KEY)
        for daemon in stage.cluster.gateway_processes:
            daemon.start()
        for url in stage.urls:
            await eventually(lambda url=url: stage.listens(url))


@pytest.mark.slow
async def test_a_clock_that_steps_over_the_end_of_a_month_and_back_opens_no_budget_twice(stage: BudgetStage) -> None:
    async def is_month(name: str) -> bool:
        answers = [await stage.ask("rich", number, max_tokens=TOKENS) for number in range(GATEWAYS)]
        return all(f"resets={name}-01" in answer.headers["x-kvgate-budget"] for answer in answers)

    async with stepped_clock(stage, "2031-02"):
        await eventually(lambda: is_month("2031-02"))  # when the next one begins
        assert await stage.until_exceeded("timed") == FITS
        for step_s, name, served in ((7200, "2031-03", 4), (-7200, "2031-02", 0), (7200, "2031-03", FITS - 4)):
            await stage.client.incrby(OFFSET_KEY, step_s * 1000)
            await eventually(lambda name=name: is_month(name))
            if served == 4:
                answers = await stage.asks("timed", served)
                assert [answer.status_code for answer in answers] == [200] * served
            else:
                assert await stage.until_exceeded("timed") == served


@pytest.mark.slow
async def test_whatever_dies_under_load_what_was_served_costs_no_more_than_the_budget(stage: BudgetStage) -> None:
    served, failed, is_over = 0, 0, False

    async def client(number: int) -> None:
        nonlocal served, failed
        while not is_over:
            number += 1
            try:
                answer = await stage.ask("chaos", number % GATEWAYS, max_tokens=TOKENS)
            except httpx.TransportError:
                failed += 1
                await asyncio.sleep(0.05)
                continue
            served += answer.status_code == 200
            if code_of(answer) == "budget_exceeded":
                return
            if answer.status_code != 200:
                await asyncio.sleep(0.05)

    clients = [asyncio.get_running_loop().create_task(client(number)) for number in range(12)]
    for number in range(3):
        await asyncio.sleep(1.0)
        daemon = stage.cluster.gateway_processes[number]
        daemon.signal(signal.SIGKILL)
        daemon.stop()
        daemon.start()
        if number == 1:
            await stage.client.flushdb()
    await asyncio.wait(clients, timeout=60)
    is_over = True
    await asyncio.gather(*clients)
    for url in stage.urls:
        await eventually(lambda url=url: stage.listens(url))
    await stage.healed()
    assert served <= FITS * PARTS["chaos"]
    assert served + await stage.until_exceeded("chaos") <= FITS * PARTS["chaos"]
    assert served > FITS * PARTS["chaos"] / 2, f"{failed} failed"


async def test_a_client_that_hangs_up_and_asks_again_pays_each_time(stage: BudgetStage) -> None:
    async with held_stream(stage.tenants["gone"], stage.urls[0], stage.new_prompt(), FITS * TOKENS) as stream:
        assert await stage.spent("gone") == (0, FITS * COST)
        refused = await stage.ask("gone", 1)
        assert code_of(refused) == "budget_reserved"
        assert int(refused.headers["retry-after"]) <= 5
        assert "x-should-retry" not in refused.headers
        await stream.goes_on()
        await stream.hang_up()

    async def is_settled() -> bool:
        settled, held = await stage.spent("gone")
        return held == 0 and 0 < settled < FITS * COST

    await eventually(is_settled)
    settled, _ = await stage.spent("gone")
    assert await stage.until_exceeded("gone") == (FITS * COST - settled) // COST


async def test_what_is_spent_is_shown_to_its_tenant_and_admins_and_in_metrics_and_answers(stage: BudgetStage) -> None:
    answer = await stage.ask("rich", 0, max_tokens=TOKENS)
    told = answer.headers["x-kvgate-budget"]
    assert told.endswith("Z")
    assert f"of={PARTS['rich'] * MONEY:.2f} USD; per=month; account=tenant; resets=" in told
    await eventually(lambda: has_settled_all(stage))
    answers = [(await stage.tenants["rich"].get(f"{url}/v1/budgets")).json() for url in stage.urls]
    assert answers == [answers[0]] * GATEWAYS
    assert answers[0]["currency"] == "USD"
    assert {one["tenant"] for one in answers[0]["budgets"]} == set(TENANTS)
    [rich] = [one for one in answers[0]["budgets"] if one["tenant"] == "rich"]
    settled, _ = await stage.spent("rich")
    assert (rich["spent"], rich["reserved"], rich["budget"]) == (settled / 1e9, 0, PARTS["rich"] * MONEY)
    assert rich["left"] == pytest.approx(rich["budget"] - rich["spent"])
    used = await stage.metric(stage.urls[1], "kvgate_budget_used_ratio", account="rich", per="month", unit="money")
    assert used == pytest.approx(rich["spent"] / rich["budget"])


async def has_settled_all(stage: BudgetStage) -> bool:
    return (await stage.spent("rich"))[1] == 0
