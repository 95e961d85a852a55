"""An API key that was made while gateways ran, as its record tells it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gateway.records.record import Record
from gateway.settings.budget_settings import BudgetSettings
from gateway.settings.queue_settings import NO_LIMITS, AccountLimitSettings

KIND = "key"
State = Literal["valid", "expired", "revoked"]
_NOT_FACTS = ("id", "version", "is_removed")


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key. The key itself is nowhere."""

    id: str
    name: str
    digest: str
    """The SHA-256 of the key, which has 256 random bits: nobody can guess it."""
    tenant: str
    admin: bool
    manages_keys: bool
    models: tuple[str, ...] | None
    """The models that it may use; None: all."""
    expires_ms: int
    kept_until_ms: int
    """When it would have expired at first. A record that expires earlier now, or is revoked, is kept until then: keys
    that it has made depend on it."""
    made_by: str
    """The id of the key that has made it."""
    made_ms: int
    in_place_of: str = ""
    """The id of the key that it replaced at a rotation; empty if it was made anew."""
    limits: AccountLimitSettings = NO_LIMITS
    budgets: tuple[BudgetSettings, ...] = ()
    account: str = ""
    """Under which id its use is counted, if that is another key's: that which was replaced first. So a key that is
    replaced gets its limits once."""
    version: int = 1
    is_removed: bool = False

    @property
    def field(self) -> str:
        return f"{KIND}/{self.id}"

    def facts(self) -> dict[str, Any]:
        """What its record says."""
        facts = {name: value for name, value in asdict(self).items() if name not in _NOT_FACTS}
        budgets = [each.model_dump(exclude_none=True) for each in self.budgets]
        return facts | {"limits": self.limits.model_dump(exclude_none=True), "budgets": budgets}

    @classmethod
    def read(cls, record: Record) -> KeyRecord:
        """Raises TypeError or ValueError for a record of another version that lacks something, or has other limits."""
        known = {name: value for name, value in record.facts.items() if name in cls.__slots__}
        if known.get("models") is not None:
            known["models"] = tuple(known["models"])
        told = known.get("limits") or {}
        limits = {name: told[name] for name in AccountLimitSettings.model_fields if name in told}
        known["limits"] = AccountLimitSettings(**limits)
        known["budgets"] = tuple(BudgetSettings(**each) for each in known.get("budgets") or ())
        return cls(id=record.id, version=record.version, is_removed=record.is_removed, **known)


def key_records(records: Iterable[Record]) -> dict[str, KeyRecord]:
    """By id. A record that cannot be used is left out."""
    found = {}
    for record in records:
        try:
            found[record.id] = KeyRecord.read(record)
        except (TypeError, ValueError):
            continue
    return found


def is_revoked(key: KeyRecord, keys: Mapping[str, KeyRecord]) -> bool:
    """Whether it was revoked, or the key that has made it: keys that were made with a stolen one end with it."""
    one: KeyRecord | None = key
    while one is not None:
        if one.is_removed:
            return True
        one = keys.get(one.made_by)
    return False


def state_of(key: KeyRecord, keys: Mapping[str, KeyRecord], now_ms: float) -> State:
    """Whether it may be used, and why not."""
    if is_revoked(key, keys):
        return "revoked"
    return "valid" if now_ms < key.expires_ms else "expired"


def newest_in_place_of(key: KeyRecord, keys: Mapping[str, KeyRecord], now_ms: float) -> KeyRecord | None:
    """The valid key that a rotation made of this one, or of its successor. None: there is none any more."""
    by_old = {each.in_place_of: each for each in keys.values() if not is_revoked(each, keys)}
    found, one = None, by_old.get(key.id)
    while one is not None:
        if state_of(one, keys, now_ms) == "valid":
            found = one
        one = by_old.get(one.id)
    return found
