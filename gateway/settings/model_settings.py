"""Models: the names that clients use, the backends that serve each, and what to do while none can."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from coordinator.keys import pool_slug
from gateway.settings.base import Count, Labels, Section, Slug, distinct

ModelName = Annotated[str, Field(min_length=1, max_length=200)]
BACKEND_CHARS = 48
MAX_WEIGHT = 1_000_000


class MatchSettings(Section):
    """Which replicas are a backend: those that fit everything that is given."""

    model: ModelName | None = None
    """A name that they serve; requests are sent to them under this name."""
    root: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    adapter: ModelName | None = None
    labels: Labels = Field(default={})

    @model_validator(mode="after")
    def _names_one_model(self) -> Self:
        if self.model is not None and self.adapter is not None:
            raise ValueError("give model or adapter: each is the name under which requests are sent")
        return self


class BackendSettings(Section):
    name: Slug = ""
    pool: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    match: MatchSettings = MatchSettings()
    weight: Annotated[int, Field(ge=0, le=MAX_WEIGHT)] = 1

    @model_validator(mode="before")
    @classmethod
    def _has_a_name(cls, told: object) -> object:
        if not isinstance(told, dict) or "name" in told:
            return told
        match = told.get("match")
        found = [told.get("pool")]
        if isinstance(match, dict):
            labels = match.get("labels")
            found += [match.get("adapter"), match.get("model"), match.get("root")]
            found += ["-".join(map(str, labels.values()))] if isinstance(labels, dict) else []
        word = next((each for each in found if isinstance(each, str) and each), None)
        return told if word is None else {**told, "name": pool_slug(word)[-BACKEND_CHARS:]}

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if self.pool is None and self.match == MatchSettings():
            raise ValueError("give pool, or match with model, root, adapter or labels: else it is every replica")
        return self


class FallbackSettings(Section):
    """Another model that may answer. What is not allowed there is refused as if there was no fallback."""

    model: ModelName
    images: bool = True
    tools: bool = True
    max_tokens: Count | None = None
    """The most tokens of a prompt and its answer."""


class ModelSettings(Section):
    name: ModelName
    aliases: list[ModelName] = Field(default=[])
    backends: Annotated[list[BackendSettings], distinct("name"), Field(max_length=16)] = Field(default=[])
    fallback: Annotated[list[FallbackSettings], distinct("model"), Field(max_length=8)] = Field(default=[])
    session: Literal["sticky", "none"] = "sticky"

    @field_validator("fallback", mode="before")
    @classmethod
    def _may_be_a_name(cls, told: object) -> object:
        if not isinstance(told, list):
            return told
        return [{"model": each} if isinstance(each, str) else each for each in told]

    @model_validator(mode="after")
    def _can_serve(self) -> Self:
        if self.backends and not any(each.weight for each in self.backends):
            raise ValueError(f"{self.name}: every backend has weight 0; give one of them more")
        if any(each.model in (self.name, *self.aliases) for each in self.fallback):
            raise ValueError(f"{self.name}: falls back to itself")
        return self


def check_models(models: list[ModelSettings]) -> list[ModelSettings]:
    """Raises ValueError if a name leads to two models."""
    seen: dict[str, str] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            if name in seen:
                raise ValueError(f"{name} is a name of {seen[name]} and of {model.name}; each must be unique")
            seen[name] = model.name
    return models
