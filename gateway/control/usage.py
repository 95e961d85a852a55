"""GET /v1/usage: what requests took and cost, from the ledger of usage. A key sees its tenant, an admin all."""

from __future__ import annotations

import asyncio
import csv
import io
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import orjson

from coordinator.errors import StoreError
from coordinator.spending import NANOS
from coordinator.usage import Consumed, Row, UsageStore
from gateway.billing.hours import Hours, order_of
from gateway.control.operations import store_away
from gateway.errors import ApiError, bad_field
from gateway.request.keyring import Caller
from gateway.settings.billing_settings import BillingSettings, time_zone

_LENGTHS = {"hour": None, "day": len("2026-11-28"), "month": len("2026-11")}
"""How much of an hour's name is that of its day or month."""
_TIME = re.compile(r"\d{4}-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01])(T([01]\d|2[0-3])([+-]\d{4})?)?)?")
_GROUPS = Row._fields
_FORMATS = ("json", "csv")
_KNOWN = ("from", "to", "by", "group", "tenant", "format")
_MOST_ROWS = 10_000
_MOST_WAITING = 8
_PIECE = 1000


class _Asked(NamedTuple):
    first: str
    """A month, a day or an hour, as the names of hours begin; also the last one."""
    last: str
    by: str
    groups: tuple[str, ...]
    tenant: str | None
    """None: all."""

    def has(self, hour: str) -> bool:
        first, last = self.first, self.last
        return order_of(first) <= order_of(hour[: len(first)]) and order_of(hour[: len(last)]) <= order_of(last)

    def group_of(self, hour: str, row: Row) -> tuple[str, ...]:
        return (hour[: _LENGTHS[self.by]], *(getattr(row, name) for name in self.groups))


class UsageReport:
    """Answers the path. One report is made after the other, an hour at a time: so however many ask, a placement waits
    for one hour's rows at most."""

    def __init__(self, settings: BillingSettings, store: UsageStore) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._waiting = 0
        self.use(settings)

    def use(self, settings: BillingSettings) -> None:
        """Other settings hold from now on."""
        self._settings, self._hours = settings, Hours(time_zone(settings.time_zone))

    async def __call__(self, caller: Caller, parameters: Mapping[str, str]) -> tuple[bytes, str]:
        """The answer and its content type. Raises ApiError."""
        asked = self._read(caller, parameters)
        if self._waiting >= _MOST_WAITING:
            message = "Too many ask for usage at this gateway; try again."
            raise ApiError(429, "gateway_overloaded", message, headers={"retry-after": "1"})
        self._waiting += 1
        try:
            async with self._turn:
                found = await self._sums(asked)
        except StoreError as error:
            raise store_away(error) from None
        finally:
            self._waiting -= 1
        if parameters.get("format") == "csv":
            return await _as_csv(asked, found, self._settings.currency), "text/csv"
        return await self._as_json(asked, found), "application/json"

    def _read(self, caller: Caller, parameters: Mapping[str, str]) -> _Asked:
        for name in parameters:
            if name not in _KNOWN:
                raise bad_field(name, f"is not known here; known: {', '.join(_KNOWN)}.")
        now = self._hours.at(time.time()).name
        first, last = parameters.get("from", now[: _LENGTHS["month"]]), parameters.get("to", now[: _LENGTHS["day"]])
        for name, moment in (("from", first), ("to", last)):
            if not _TIME.fullmatch(moment):
                shown = "2026-11, 2026-11-28, 2026-11-28T14 or 2026-11-28T14+0100"
                raise bad_field(name, f"give a month, a day or an hour: {shown} (in a URL, write + as %2B).")
        if order_of(last) < order_of(first[: len(last)]):
            raise bad_field("to", f"{last} is before {first}, the beginning.")
        by = _one_of(parameters, "by", "month", tuple(_LENGTHS))
        _one_of(parameters, "format", "json", _FORMATS)
        groups = tuple(name for name in parameters.get("group", "tenant,model").split(",") if name)
        if not set(groups) <= set(_GROUPS):
            raise bad_field("group", f"give some of {', '.join(_GROUPS)}, with commas between them.")
        tenant = parameters.get("tenant")
        if not caller.is_admin:
            if tenant not in (None, caller.tenant):
                raise ApiError(403, "admin_key_required", "tenant: the usage of others needs an admin key.", "tenant")
            tenant = caller.tenant
        return _Asked(first, last, by, tuple(dict.fromkeys(groups)), tenant)

    async def _sums(self, asked: _Asked) -> dict[tuple[str, ...], Consumed]:
        """By time, and by the groups. Raises StoreError, and ApiError if there are too many."""
        found: dict[tuple[str, ...], Consumed] = {}
        for hour in filter(asked.has, filter(_TIME.fullmatch, await self._store.hours())):
            for row, consumed in (await self._store.rows(hour)).items():
                if asked.tenant in (None, row.tenant):
                    found.setdefault(asked.group_of(hour, row), Consumed()).add(consumed)
            if len(found) > _MOST_ROWS:
                message = f"These would be more than {_MOST_ROWS} rows: ask for less time, by day, or for fewer groups."
                raise ApiError(400, "limit_exceeded", message, "group")
        return dict(sorted(found.items(), key=lambda each: (order_of(each[0][0]), each[0])))

    async def _as_json(self, asked: _Asked, found: Mapping[tuple[str, ...], Consumed]) -> bytes:
        names, rows, totals = ("time", *asked.groups), list[dict[str, Any]](), Consumed()
        async for group, consumed in _in_pieces(found):
            rows.append(dict(zip(names, group, strict=True)) | _shown(consumed))
            totals.add(consumed)
        return orjson.dumps(
            {
                "currency": self._settings.currency,
                "time_zone": self._settings.time_zone,
                "from": asked.first,
                "to": asked.last,
                "by": asked.by,
                "group": asked.groups,
                "rows": rows,
                "totals": _shown(totals),
            }
        )


def _one_of(parameters: Mapping[str, str], name: str, default: str, known: tuple[str, ...]) -> str:
    if (given := parameters.get(name, default)) not in known:
        raise bad_field(name, f"must be one of {', '.join(known)}.")
    return given


def _shown(consumed: Consumed) -> dict[str, Any]:
    """With money in units of the currency."""
    told = asdict(consumed)
    return told | {"cost": told.pop("cost_nanos") / NANOS, "saved": told.pop("saved_nanos") / NANOS}


async def _in_pieces(found: Mapping[tuple[str, ...], Consumed]) -> AsyncIterator[tuple[tuple[str, ...], Consumed]]:
    """All rows. Requests run in between: 10 000 rows would hold them up for longer than 50 ms."""
    for number, row in enumerate(found.items(), 1):
        yield row
        if number % _PIECE == 0:
            await asyncio.sleep(0)


async def _as_csv(asked: _Asked, found: Mapping[tuple[str, ...], Consumed], currency: str) -> bytes:
    """A head line, and a line for each row."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["time", *asked.groups, *_shown(Consumed()), "currency"])
    async for group, consumed in _in_pieces(found):
        lines.writerow([*map(_harmless, group), *consumed.text.split(), currency])
    return text.getvalue().encode()


def _harmless(name: str) -> str:
    """A spreadsheet takes a cell that begins so for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name
