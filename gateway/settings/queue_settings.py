"""When requests wait for room, or for a replica, for how long, and who goes first."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from coordinator.policy_knobs import PolicyKnobs
from gateway.settings.base import Count, Seconds, Section, Slug, distinct
from gateway.settings.budget_settings import Budgets

MAX_BANDS = 10
MAX_PER_MIN = 10**12
_DEFAULTS = PolicyKnobs()


class BandSettings(Section):
    """One priority band. Those that stand first in the configuration go first."""

    name: Slug
    room_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """The part of a replica's room that its requests may use; None: see docs/tenants.md."""


class KnownModelSettings(Section):
    """A model that requests may name while no replica serves it."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    root: Annotated[str, Field(max_length=200)] = ""
    is_adapter: bool = False

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> Self:
        if self.is_adapter and not self.root:
            raise ValueError("root: an adapter needs it: the base model, as the replicas' vLLM was given it")
        return self


class QueueSettings(Section):
    max_wait_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = _DEFAULTS.max_wait_s
    prefill_tokens_per_s: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = _DEFAULTS.prefill_tokens_per_s
    wait_s: Seconds = 60
    starve_s: Seconds = 30
    max_waiting: Count = _DEFAULTS.max_waiting
    max_waiting_per_tenant: Count = _DEFAULTS.max_waiting_per_tenant
    bands: Annotated[list[BandSettings], Field(min_length=1, max_length=MAX_BANDS), distinct("name")] = Field(
        default=[BandSettings(name="realtime"), BandSettings(name="normal"), BandSettings(name="batch")]
    )
    default_band: Slug = "normal"
    engine_priority: bool = False
    keep_alive_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 0
    hold_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 0
    models: Annotated[list[KnownModelSettings], distinct("name")] = Field(default=[])

    @model_validator(mode="after")
    def _models_are_for_holding(self) -> Self:
        if self.models and not self.hold_s:
            raise ValueError("models: are for requests that are held: set hold_s above 0, or leave them out")
        return self

    @model_validator(mode="after")
    def _default_is_a_band(self) -> Self:
        names = [band.name for band in self.bands]
        if self.default_band not in names:
            raise ValueError(f"default_band is {self.default_band}, which is none of the bands: {', '.join(names)}")
        return self


class AccountLimitSettings(Section):
    """What one tenant, or one API key, may have over all gateways."""

    concurrency: Count | None = None
    requests_per_min: Annotated[int, Field(ge=1, le=MAX_PER_MIN)] | None = None
    tokens_per_min: Annotated[int, Field(ge=1, le=MAX_PER_MIN)] | None = None


NO_LIMITS = AccountLimitSettings()


class TenantSettings(Section):
    """One tenant: those of security.api_keys belong to one."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 1
    priority: Slug | None = None
    limits: AccountLimitSettings = Field(default=NO_LIMITS)
    budgets: Budgets = Field(default=[])

    @field_validator("name")
    @classmethod
    def _is_text(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError("must be printable")
        return name
