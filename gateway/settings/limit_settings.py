"""A gateway's limits, timeouts, retries and health checks."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gateway.settings.base import Count, Seconds, Section


class LimitSettings(Section):
    max_in_flight: Count = 1024
    max_body_bytes: Annotated[int, Field(ge=1024)] = 64 * 2**20
    max_buffered_bytes: Annotated[int, Field(ge=1024)] = 2**30
    max_image_pixels: Count = 64_000_000


class TimeoutSettings(Section):
    body_s: Seconds = 60
    write_s: Seconds = 60
    first_byte_s: Seconds = 300
    request_s: Seconds = 900
    idle_s: Seconds = 300
    grace_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 30

    @model_validator(mode="after")
    def _nested(self) -> Self:
        if self.first_byte_s > self.request_s:
            raise ValueError(f"first_byte_s is {self.first_byte_s:g}; it must fit in request_s, {self.request_s:g}")
        # The default idle_s may be longer than a short request_s: then request_s ends the answer.
        if "idle_s" in self.model_fields_set and self.idle_s > self.request_s:
            raise ValueError("idle_s is more than request_s; it would never end an answer")
        return self


class RetrySettings(Section):
    max_attempts: Annotated[int, Field(ge=1, le=16)] = 3


class ResumeSettings(Section):
    """When a stream that breaks goes on at another replica."""

    enabled: bool = True
    max_resumptions: Annotated[int, Field(ge=1, le=16)] = 3
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 16_384
    max_prompt_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 16_384


class HedgeSettings(Section):
    """When a stream whose first byte is late is sent to a second replica as well."""

    max_share: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.02
    late_factor: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] | None = None


class PairSettings(Section):
    """How one replica computes prompts for another one, if the replicas have roles."""

    protocol: Literal["nixl", "store", "mooncake"] = "nixl"
    min_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 512


class HealthSettings(Section):
    timeout_s: Seconds = 1
    hang_s: Seconds = 10
