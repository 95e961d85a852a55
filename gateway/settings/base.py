"""The base class of all sections of a configuration, and the types of their fields."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_ID_CHARS = 48
Slug = Annotated[str, Field(pattern=rf"^[a-z0-9._-]{{1,{MAX_ID_CHARS}}}$")]
Namespace = Annotated[str, Field(pattern=rf"^[a-z0-9._-]{{0,{MAX_ID_CHARS}}}$")]
HostName = Annotated[str, Field(pattern=r"^[^/:\s]+$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, le=60_000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
_LabelText = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]{1,63}$")]
ROLE_LABEL: Final = "kvgate.io/role"
"""The label that says what a replica is for: see Role. Without it, it is `both`."""
BOOTSTRAP_PORT_LABEL: Final = "kvgate.io/bootstrap-port"
"""The label with the port of a prefill replica's Mooncake bootstrap server; without it, vLLM's default."""
Role = Literal["both", "prefill", "decode"]
"""`prefill`: it computes prompts for others, and answers nobody. `decode`: others compute prompts for it. `both`: it
computes its own."""
ROLES: Final = get_args(Role)


def checked_labels(labels: dict[str, str]) -> dict[str, str]:
    """Raises ValueError if one that gateways understand is wrong."""
    role, port = labels.get(ROLE_LABEL), labels.get(BOOTSTRAP_PORT_LABEL)
    if role is not None and role not in ROLES:
        raise ValueError(f"{ROLE_LABEL}: {role!r} has to be {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    if port is not None and not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"{BOOTSTRAP_PORT_LABEL}: {port!r} is no port")
    return labels


Labels = Annotated[dict[_LabelText, _LabelText], Field(max_length=16), AfterValidator(checked_labels)]
"""What operators call a replica, like `version: v2`."""


def short_id(name: str) -> str:
    """An id made of a name that may be too long: its end, which differs between the pods of a deployment."""
    return name[-MAX_ID_CHARS:]


def distinct(*names: str) -> AfterValidator:
    """The check of a list of sections: no two have the same value in one of these fields. A name may have the words for
    it behind a colon."""

    def check(items: list[Any]) -> list[Any]:
        for name, _, words in (each.partition(": ") for each in names):
            values = Counter(getattr(item, name) for item in items)
            if repeated := [value for value, count in values.items() if count > 1]:
                raise ValueError(f"{words or name} given twice: {', '.join(repeated)}; each must be unique")
        return items

    return AfterValidator(check)


class Section(BaseModel):
    """Frozen, without coercion (`port: "8080"` is a mistake, not a port) and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)
