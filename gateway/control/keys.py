"""Makes, lists, replaces and revokes the API keys that are kept in Redis, and shows who did.

An admin's key may do this for all tenants. A key with `manages_keys` may do it for its own tenant. Nobody makes a key
that can do more, may use more models, has higher limits or budgets, or lives longer than their own.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Annotated, Any, TypeVar

import structlog
from pydantic import Field, ValidationError

from coordinator.errors import StoreError
from coordinator.records import AuditNote
from gateway.control.operations import records_secret_missing, store_away
from gateway.errors import ApiError, bad_field
from gateway.records.key_record import KIND, KeyRecord, is_revoked, key_records, newest_in_place_of, state_of
from gateway.records.record import DAY_MS, Record, Signer
from gateway.records.record_book import MOST, ChangedMeanwhileError, RecordBook
from gateway.request.keyring import Caller, Keyring
from gateway.settings.base import Section
from gateway.settings.budget_settings import Budgets, BudgetSettings
from gateway.settings.queue_settings import NO_LIMITS, AccountLimitSettings

_log = structlog.get_logger("kvgate.keys")

_DEFAULT_DAYS, _MOST_DAYS = 90, 365
_MOST_VALID, _MOST_OF_TENANT = 100, 1000
"""Of each tenant: valid keys; and all that are kept, also revoked ones."""
_OVERLAP_S, _MOST_OVERLAP_S = 86_400, 30 * 86_400
MOST_AUDITED = 1000
_Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")]


class NewKey(Section):
    """The body of a request for a new key."""

    name: _Name
    tenant: _Name | None = None
    admin: bool = False
    manages_keys: bool = False
    models: Annotated[list[_Name], Field(min_length=1, max_length=50)] | None = None
    limits: AccountLimitSettings = NO_LIMITS
    budgets: Budgets = Field(default=[])
    expires_days: Annotated[float, Field(gt=0, le=_MOST_DAYS, allow_inf_nan=False)] | None = None


class Rotation(Section):
    """The body of a request to replace a key."""

    overlap_s: Annotated[float, Field(ge=0, le=_MOST_OVERLAP_S, allow_inf_nan=False)] = _OVERLAP_S
    expires_days: Annotated[float, Field(gt=0, le=_MOST_DAYS, allow_inf_nan=False)] | None = None


_Body = TypeVar("_Body", bound=Section)


class Keys:
    """Answers the paths of keys. All methods raise ApiError."""

    def __init__(self, book: RecordBook, keyring: Keyring) -> None:
        self._book, self._keyring = book, keyring

    # -- what is asked -------------------------------------------------------------------------------------------

    async def listed(self, caller: Caller) -> list[dict[str, Any]]:
        """The keys that the caller may see."""
        await self._begin(caller)
        keys, now_ms = self._all(), self._keyring.clock.now_ms()
        rows = [_of_configuration(one) for one in self._keyring.configured()]
        rows += [_shown(key, keys, now_ms) for key in sorted(keys.values(), key=lambda key: (key.tenant, key.made_ms))]
        return [row for row in rows if caller.is_admin or row["tenant"] == caller.tenant]

    async def create(self, caller: Caller, body: bytes) -> dict[str, Any]:
        """A new key. It is told only here."""
        await self._begin(caller)
        signer, wanted = self._signer(), _read(NewKey, body)
        tenant = wanted.tenant or caller.tenant or ""
        models = self._models(caller, wanted.models)
        if not caller.is_admin and (tenant != caller.tenant or wanted.admin):
            raise _beyond("tenant" if tenant != caller.tenant else "admin", "another tenant or an admin")
        names = {key.name for key in self._room_of(tenant)}
        names |= {one.key for one in self._keyring.configured() if one.tenant == tenant}
        if wanted.name in names:
            raise ApiError(409, "name_taken", "name: this tenant has a valid key of this name.", "name")
        text, key = self._new(signer, caller, wanted.name, tenant, models, wanted.expires_days)
        _check_limits(caller.limits, wanted.limits)
        _check_budgets(caller.budgets, wanted.budgets)
        key = replace(key, admin=wanted.admin, manages_keys=wanted.manages_keys)
        key = replace(key, limits=wanted.limits, budgets=tuple(wanted.budgets))
        await self._put(caller, "create", [_record(signer, key)], key)
        return {"key": text, **self._told(key)}

    async def rotate(self, caller: Caller, key_id: str, body: bytes) -> dict[str, Any]:
        """Another key in the place of one, which stays valid for a while. It is told only here."""
        await self._begin(caller)
        signer, wanted, old = self._signer(), _read(Rotation, body), self._find(caller, key_id)
        now_ms = self._keyring.clock.now_ms()
        _check_is_newest(old, self._all(), now_ms)
        if old.models is None and caller.models is not None:
            raise _beyond("models", "models that yours may not use")
        models = self._models(caller, None if old.models is None else list(old.models))
        _check_limits(caller.limits, old.limits)
        _check_budgets(caller.budgets, old.budgets)
        self._room_of(old.tenant)
        text, new = self._new(signer, caller, old.name, old.tenant, models, wanted.expires_days)
        new = replace(new, admin=old.admin, manages_keys=old.manages_keys, limits=old.limits)
        new = replace(new, budgets=old.budgets, account=old.account or old.id, in_place_of=old.id)
        ends_ms = min(old.expires_ms, int(now_ms + wanted.overlap_s * 1000))
        ended = replace(old, expires_ms=ends_ms, version=old.version + 1)
        await self._put(caller, "rotate", [_record(signer, new), _record(signer, ended)], new)
        return {"key": text, **self._told(new), "replaces": {"id": old.id, "expires_ms": ends_ms}}

    async def revoke(self, caller: Caller, key_id: str) -> dict[str, Any]:
        """A key is not valid any more, nor are those that it has made. At this gateway at once."""
        await self._begin(caller)
        signer, key = self._signer(), self._find(caller, key_id)
        keys = self._all()
        if not key.is_removed:
            gone = replace(key, is_removed=True, version=key.version + 1)
            try:
                await self._book.remove(_record(signer, gone), _note(caller, "revoke", key))
            except StoreError as error:
                _log.warning("key revoked at this gateway only", id=key.id, who=caller.id, reason=str(error))
                message = (
                    f"It is revoked at this gateway only: Redis does not answer ({error}). The others hear of it when "
                    "Redis is back."
                )
                raise ApiError(503, "not_yet_everywhere", message, headers={"retry-after": "1"}) from None
        after = self._all()
        also = [one.id for one in after.values() if is_revoked(one, after) and not is_revoked(one, keys)]
        return {**self._told(self._find(caller, key_id)), "also_revoked": sorted(set(also) - {key_id})}

    async def audit(self, caller: Caller, most: int) -> list[dict[str, Any]]:
        """Who has changed what, newest first."""
        await self._begin(caller)
        self._signer()
        try:
            entries = await self._book.audit(MOST_AUDITED)
        except StoreError as error:
            raise store_away(error) from None
        seen = [one for one in entries if caller.is_admin or one.note.tenant == caller.tenant]
        return [{"at_ms": one.at_ms, **asdict(one.note)} for one in seen[:most]]

    async def _begin(self, caller: Caller) -> None:
        """Refuses others. What was done at another gateway just now is known here."""
        if not (caller.is_admin or caller.manages_keys):
            raise ApiError(403, "admin_key_required", "This needs an admin key, or one with `manages_keys`.")
        if self._book.signer is not None:
            with suppress(StoreError):
                await self._book.refresh()

    # -- rules ---------------------------------------------------------------------------------------------------

    def _signer(self) -> Signer:
        if self._book.signer is None:
            raise records_secret_missing()
        return self._book.signer

    def _all(self) -> dict[str, KeyRecord]:
        return key_records(self._book.of_kind(KIND))

    def _find(self, caller: Caller, key_id: str) -> KeyRecord:
        """A key that the caller may change."""
        key = self._all().get(key_id)
        if key is not None and (caller.is_admin or (key.tenant == caller.tenant and not key.admin)):
            return key
        if any(
            one.id == key_id and (caller.is_admin or one.tenant == caller.tenant) for one in self._keyring.configured()
        ):
            message = "id: this key is in the configuration file: change it there."
            raise ApiError(409, "key_in_configuration", message, "id")
        raise ApiError(404, "key_not_found", "id: there is no such key; GET /v1/keys lists them.", "id")

    def _models(self, caller: Caller, wanted: list[str] | None) -> tuple[str, ...] | None:
        if caller.models is None:
            return None if wanted is None else tuple(wanted)
        if wanted is None:
            return tuple(sorted(caller.models))
        if not caller.models.issuperset(wanted):
            raise _beyond("models", "models that yours may not use")
        return tuple(wanted)

    def _room_of(self, tenant: str) -> list[KeyRecord]:
        """The valid keys of a tenant, which may have one more."""
        keys, now_ms = self._all(), self._keyring.clock.now_ms()
        own = [key for key in keys.values() if key.tenant == tenant]
        valid = [key for key in own if state_of(key, keys, now_ms) == "valid"]
        if len(valid) >= _MOST_VALID or len(own) >= _MOST_OF_TENANT or self._book.is_full:
            message = (
                f"There are too many keys: a tenant has at most {_MOST_VALID} valid ones, and {_MOST_OF_TENANT} with "
                f"those that were revoked or replaced. All tenants have at most {MOST}."
            )
            raise ApiError(409, "too_many_keys", message)
        return valid

    def _new(
        self,
        signer: Signer,
        caller: Caller,
        name: str,
        tenant: str,
        models: tuple[str, ...] | None,
        days: float | None,
    ) -> tuple[str, KeyRecord]:
        """A key, and its record without rights."""
        now_ms, own_ms = self._keyring.clock.now_ms(), self._keyring.expires_ms(caller)
        expires_ms = now_ms + (days or _DEFAULT_DAYS) * DAY_MS
        if days is not None and expires_ms > own_ms:
            raise _beyond("expires_days", "a longer life than your own key has")
        text, ends_ms = f"kvg_{secrets.token_urlsafe(32)}", math.floor(min(expires_ms, own_ms))
        key = KeyRecord(
            id=f"k-{secrets.token_hex(8)}",
            name=name,
            digest=hashlib.sha256(text.encode()).hexdigest(),
            tenant=tenant,
            admin=False,
            manages_keys=False,
            models=models,
            expires_ms=ends_ms,
            kept_until_ms=ends_ms,
            made_by=caller.id,
            made_ms=int(now_ms),
        )
        return text, key

    async def _put(self, caller: Caller, what: str, records: list[Record], key: KeyRecord) -> None:
        try:
            await self._book.put(records, _note(caller, what, key))
        except StoreError as error:
            raise store_away(error) from None
        except ChangedMeanwhileError:
            message = "The key was changed meanwhile; look at it, and try again."
            raise ApiError(409, "changed_meanwhile", message) from None

    def _told(self, key: KeyRecord) -> dict[str, Any]:
        return _shown(key, self._all(), self._keyring.clock.now_ms())


def _check_is_newest(old: KeyRecord, keys: Mapping[str, KeyRecord], now_ms: float) -> None:
    """Only such a key is rotated. Two keys in the place of one would look alike in every list."""
    if (state := state_of(old, keys, now_ms)) != "valid":
        raise ApiError(409, "key_not_valid", f"id: this key is {state}; make a new one.", "id")
    if (newer := newest_in_place_of(old, keys, now_ms)) is not None:
        message = f"id: {newer.id} is in place of this key already: rotate {newer.id}, or revoke it first."
        raise ApiError(409, "key_rotated", message, "id")


def _beyond(param: str, what: str) -> ApiError:
    return ApiError(403, "beyond_own_key", f"{param}: your key may not make a key for {what}.", param)


def _check_limits(own: AccountLimitSettings, wanted: AccountLimitSettings) -> None:
    """A key with a limit makes no key without it, or with a higher one."""
    for name, most in own.model_dump(exclude_none=True).items():
        value = getattr(wanted, name)
        if value is None or value > most:
            raise ApiError(
                403,
                "beyond_own_key",
                f"limits.{name}: your key may not make a key with more than its own {most}: set it to {most} or less.",
                f"limits.{name}",
            )


def _check_budgets(own: Sequence[BudgetSettings], wanted: Sequence[BudgetSettings]) -> None:
    """A key with a budget makes no key without it, or with a larger one."""
    for each in own:
        amounts = [one.amount for one in wanted if (one.per, one.unit) == (each.per, each.unit)]
        if not amounts or amounts[0] > each.amount:
            raise ApiError(
                403,
                "beyond_own_key",
                f"budgets: your key may not make a key with more than its own {each.amount:.12g} ({each.unit}) per "
                f"{each.per}: give it a budget of this or less.",
                "budgets",
            )


def _read(model: type[_Body], body: bytes) -> _Body:
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "body"
        message = first["msg"].removeprefix("Value error, ")
        raise bad_field(field, f"{message[:1].lower()}{message[1:]}.") from None


def _record(signer: Signer, key: KeyRecord) -> Record:
    try:
        return signer.write(key.field, key.version, key.facts(), is_removed=key.is_removed)
    except ValueError:
        raise bad_field("models", "they are too long together.") from None


def _note(caller: Caller, what: str, key: KeyRecord) -> AuditNote:
    old = f" in place of {key.in_place_of}" if what == "rotate" else ""
    return AuditNote(caller.key, f"{what} key", f"{key.name} ({key.id}){old}", key.tenant)


def _shown(key: KeyRecord, keys: Mapping[str, KeyRecord], now_ms: float) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "tenant": key.tenant,
        "admin": key.admin,
        "manages_keys": key.manages_keys,
        "models": key.models,
        "limits": key.limits.model_dump(exclude_none=True),
        "budgets": _told_budgets(key.budgets),
        "state": state_of(key, keys, now_ms),
        "expires_ms": key.expires_ms,
        "made_ms": key.made_ms,
        "made_by": key.made_by,
        "in_place_of": key.in_place_of or None,
    }


def _told_budgets(budgets: Sequence[BudgetSettings]) -> list[dict[str, Any]]:
    return [each.model_dump(exclude_none=True) for each in budgets]


def _of_configuration(caller: Caller) -> dict[str, Any]:
    return {
        "id": caller.id,
        "name": caller.key,
        "tenant": caller.tenant,
        "admin": caller.is_admin,
        "manages_keys": caller.manages_keys,
        "models": None if caller.models is None else sorted(caller.models),
        "limits": caller.limits.model_dump(exclude_none=True),
        "budgets": _told_budgets(caller.budgets),
        "state": "configured",
        "expires_ms": None,
        "made_ms": None,
        "made_by": None,
        "in_place_of": None,
    }
