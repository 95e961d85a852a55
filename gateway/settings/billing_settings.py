"""What requests cost, and in which time zone they are counted."""

from __future__ import annotations

from datetime import UTC, tzinfo
from typing import Annotated, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator, model_validator

from gateway.settings.base import Section, distinct
from gateway.settings.model_settings import ModelName

Money = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


class PriceSettings(Section):
    model: ModelName
    uncached_input_per_mtok: Money = 0
    cached_input_per_mtok: Money | None = None
    output_per_mtok: Money = 0
    per_image: Money = 0

    @model_validator(mode="after")
    def _cached_tokens_are_no_dearer(self) -> Self:
        if self.cached_input_per_mtok is not None and self.cached_input_per_mtok > self.uncached_input_per_mtok:
            raise ValueError(f"{self.model}: cached_input_per_mtok is more than uncached_input_per_mtok")
        return self


class BillingSettings(Section):
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    time_zone: str = "UTC"
    prices: Annotated[list[PriceSettings], distinct("model")] = Field(default=[])
    usage_days: Annotated[int, Field(ge=1, le=400)] = 35

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, name: str) -> str:
        time_zone(name)
        return name


def time_zone(name: str) -> tzinfo:
    """The time zone of an IANA name; else raises ValueError. UTC needs no list of time zones on the machine."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"{name!r} is no time zone that this machine knows: write an IANA name, like Europe/Berlin, or UTC. If it "
            "is one, install the machine's list of time zones (apt install tzdata, or pip install tzdata)"
        ) from None
