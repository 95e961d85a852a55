"""The base class of all sections of a configuration, and the types of their fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_ID_CHARS = 48
Slug = Annotated[str, Field(pattern=rf"^[a-z0-9._-]{{1,{MAX_ID_CHARS}}}$")]
Namespace = Annotated[str, Field(pattern=rf"^[a-z0-9._-]{{0,{MAX_ID_CHARS}}}$")]
HostName = Annotated[str, Field(pattern=r"^[^/:\s]+$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, le=60_000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


def short_id(name: str) -> str:
    """An id made of a name that may be too long: its end, which differs between the pods of a deployment."""
    return name[-MAX_ID_CHARS:]


class Section(BaseModel):
    """Frozen, without coercion (`port: "8080"` is a mistake, not a port) and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)
