"""From a YAML file and some variables of the environment to a checked settings object, whatever its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.settings.config_check import explain, read_yaml

Settings = TypeVar("Settings", bound=BaseModel)


class SettingsError(Exception):
    """A configuration that cannot be used: `problems` has one line per mistake, each naming its field."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems

    def listed(self) -> str:
        """How many there are, and each on a line of its own."""
        count = len(self.problems)
        return f"{count} problem{'' if count == 1 else 's'}" + "".join(f"\n  {problem}" for problem in self.problems)


def read_file(path: Path) -> tuple[dict[Any, Any], list[str]]:
    """The mapping in a YAML file, and the problems that leave it readable. Raises SettingsError where it is not."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError([f"cannot be read ({why}); give a YAML file"]) from error
    data, problems = read_yaml(text)
    if data is None:
        raise SettingsError(problems)
    return data, problems


def build(
    model: type[Settings],
    data: dict[Any, Any],
    env: Mapping[str, str],
    overrides: Mapping[str, tuple[str, ...]],
    known_problems: list[str] | None = None,
) -> Settings:
    """What `data` and the variables in `env` make of `model`; `overrides` says which field each variable overrides.

    An empty variable overrides nothing. Raises SettingsError with every problem found, `known_problems` among them.
    """
    problems = known_problems or []
    overridden = {name: field for name, field in overrides.items() if env.get(name)}
    merged: Any = data
    for name, field in overridden.items():
        merged = _with(merged, field, env[name])
    try:
        settings = model.model_validate(merged)
    except ValidationError as error:
        origins = {field: name for name, field in overridden.items()}
        raise SettingsError(problems + explain(error, model, origins)) from None
    if problems:
        raise SettingsError(problems)
    return settings


def _with(section: Any, field: tuple[str, ...], value: str) -> Any:
    """A copy of `section` in which `field` is `value`; the section itself, where that is none: it is the problem."""
    if not field:
        return value
    if not isinstance(section, dict):
        return section
    first, *rest = field
    return {**section, first: _with(section.get(first, {}), tuple(rest), value)}
