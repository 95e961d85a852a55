"""GET /v1/usage: which rows there are, for whom. (tests/cluster/test_usage.py shows it at four gateways.)"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import orjson
import pytest

from coordinator.usage import Consumed, Row, UsageStore
from gateway.control import usage as control
from gateway.control.usage import UsageReport
from gateway.errors import ApiError
from gateway.request.keyring import Caller
from gateway.settings.billing_settings import BillingSettings

CHAT, SMALL = Consumed(2, 1, 700, 300, 50, 2, 1_500_000_000, 270_000), Consumed(1, 0, 10, 0, 5)
HOURS = {
    "2026-09-30T23+0200": {Row("research", "alice", "chat"): CHAT},
    "2026-10-01T00+0200": {Row("research", "alice", "chat"): CHAT, Row("research", "ann", "small"): SMALL},
    "2026-10-25T02+0200": {Row("sales", "bob", "chat"): CHAT},
    "2026-10-25T02+0100": {Row("sales", "bob", "chat"): CHAT},
    "2026-11-01T00+0100": {Row("=sales", "", ""): SMALL},
}
ADMIN, ALICE = Caller("operations", True, "root", is_admin=True), Caller("research", False, "alice")


class Hours:
    async def hours(self) -> list[str]:
        return list(HOURS)

    async def rows(self, hour: str) -> dict[Row, Consumed]:
        return HOURS[hour]


@pytest.fixture
def report() -> UsageReport:
    return UsageReport(BillingSettings(time_zone="Europe/Berlin", currency="EUR"), cast("UsageStore", Hours()))


async def asked(report: UsageReport, caller: Caller = ADMIN, **query: str) -> Any:
    whole = {"from": "2026-09", "to": "2026-11", **{name.rstrip("_"): text for name, text in query.items()}}
    answer, kind = await report(caller, whole)
    assert kind == "application/json"
    return orjson.loads(answer)


@pytest.mark.parametrize(
    ("query", "requests"),
    [
        ({"by": "month", "group": ""}, {("2026-09",): 2, ("2026-10",): 7, ("2026-11",): 1}),
        ({"from_": "2026-10", "to": "2026-10", "by": "day", "group": ""}, {("2026-10-01",): 3, ("2026-10-25",): 4}),
        ({"from_": "2026-10-25", "to": "2026-10-25", "group": "model"}, {("2026-10", "chat"): 4}),
        ({"from_": "2026-10-25T02", "to": "2026-10", "group": "model"}, {("2026-10", "chat"): 4}),
        (
            {"from_": "2026-10-25T02", "to": "2026-10-25T02", "by": "hour", "group": ""},
            {("2026-10-25T02+0100",): 2, ("2026-10-25T02+0200",): 2},
        ),
        (
            {"from_": "2026-10-01T00+0200", "to": "2026-10-25T02+0200", "group": ""},
            {("2026-10",): 5},
        ),
        (
            {"group": "key,tenant", "tenant": "research", "from_": "2026-10"},
            {("2026-10", "alice", "research"): 2, ("2026-10", "ann", "research"): 1},
        ),
    ],
)
async def test_from_to_by_and_group_choose_the_rows(
    report: UsageReport, query: dict[str, str], requests: dict[tuple[str, ...], int]
) -> None:
    answer = await asked(report, **query)
    names = ("time", *answer["group"])
    assert {tuple(row[name] for name in names): row["requests"] for row in answer["rows"]} == requests
    assert answer["totals"]["requests"] == sum(requests.values())
    assert (answer["currency"], answer["time_zone"]) == ("EUR", "Europe/Berlin")


async def test_hours_are_in_their_order_and_each_that_is_printed_can_be_asked_for(report: UsageReport) -> None:
    hours = [row["time"] for row in (await asked(report, by="hour", group=""))["rows"]]
    assert hours == list(HOURS)
    for first, hour in enumerate(hours):
        since = await asked(report, by="hour", group="", from_=hour)
        assert [row["time"] for row in since["rows"]] == hours[first:]
        only = await asked(report, by="hour", group="", from_=hour, to=hour)
        assert [row["time"] for row in only["rows"]] == [hour]


async def test_a_key_sees_its_own_tenant_and_no_other(report: UsageReport) -> None:
    answer = await asked(report, ALICE, group="tenant,key")
    assert {row["tenant"] for row in answer["rows"]} == {"research"}
    assert answer["totals"]["cost"] == 3.0
    assert await asked(report, ALICE, group="tenant,key", tenant="research") == answer
    with pytest.raises(ApiError, match="admin key") as caught:
        await asked(report, ALICE, tenant="sales")
    assert caught.value.status == 403


async def test_csv_has_exact_money_and_no_formulas(report: UsageReport) -> None:
    text, kind = await report(ADMIN, {"from": "2026-10-25", "to": "2026-11-01", "by": "day", "format": "csv"})
    assert kind == "text/csv"
    assert text.decode().splitlines() == [
        "time,tenant,model,requests,errors,uncached_tokens,cached_tokens,output_tokens,images,cost,saved,currency",
        "2026-10-25,sales,chat,4,2,1400,600,100,4,3.000000000,0.000540000,EUR",
        "2026-11-01,'=sales,,1,0,10,0,5,0,0.000000000,0.000000000,EUR",
    ]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"from_": "yesterday"}, "from"),
        ({"to": "2026-1-1"}, "to"),
        ({"from_": "2026-13"}, "from"),
        ({"to": "2026-11-32"}, "to"),
        ({"to": "2026-11-28T24"}, "to"),
        ({"from_": "2026-11-28T14 0100"}, "from"),
        ({"from_": "2026-10-25T02+0100", "to": "2026-10-25T02+0200"}, "to"),
        ({"from_": "2026-12", "to": "2026-11-30"}, "to"),
        ({"by": "week"}, "by"),
        ({"group": "replica"}, "group"),
        ({"format": "xml"}, "format"),
        ({"form": "2026-10"}, "form"),
    ],
)
async def test_a_mistake_is_named(report: UsageReport, query: dict[str, str], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        await asked(report, **query)
    assert (caught.value.status, caught.value.param) == (400, field)


async def test_an_answer_that_would_be_too_large_says_how_to_ask_for_less(
    report: UsageReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_MOST_ROWS", 3)
    assert len((await asked(report, group=""))["rows"]) == 3
    with pytest.raises(ApiError, match="fewer groups"):
        await asked(report, group="tenant,key")


@pytest.mark.parametrize("kind", ["json", "csv"])
async def test_requests_run_while_10_000_rows_are_written(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    hour = {Row("team", f"key{number}", "chat"): CHAT for number in range(10_000)}
    monkeypatch.setitem(HOURS, "2026-11-02T00+0100", hour)
    report = UsageReport(BillingSettings(time_zone="Europe/Berlin"), cast("UsageStore", Hours()))
    asked = {"from": "2026-11-02", "to": "2026-11-02", "group": "key", "format": kind}
    answer = asyncio.get_running_loop().create_task(report(ADMIN, asked))
    turns = 0
    while not answer.done():
        await asyncio.sleep(0)
        turns += 1
    assert answer.result()[0].count(b"key") >= 10_000
    assert turns >= 10
