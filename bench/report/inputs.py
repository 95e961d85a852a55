"""The fields of each benchmark's JSON that the report reads. It ignores all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

Scalar = str | float | bool | None
_T = TypeVar("_T")


class Unreadable(Exception):
    """A file does not have its benchmark's format."""


class OverheadRow(BaseModel, frozen=True):
    """A contender's results for one load (`bench.overhead.cell`)."""

    contender: str
    prompt: str
    answer: str
    connections: int
    rate_per_s: float = 0.0
    requests: int
    failed: int
    per_s: float
    cpu_us: float
    store_cpu_us: float
    idle: float
    first_byte_p50_ms: float
    first_byte_p99_ms: float


@dataclass(frozen=True)
class Results:
    """A file's rows, and its description of the machine and the versions."""

    rows: list[Any]
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    """The command that made the file."""
    left_out: list[str] = field(default_factory=list)
    """The measurements that were left out, with reasons."""

    def rows_as(self, kind: TypeAdapter[list[_T]]) -> list[_T]:
        try:
            return kind.validate_python(self.rows)
        except ValidationError as error:
            raise Unreadable(_first_problem(error)) from None


def read(path: Path) -> Results | None:
    """Returns None if there is no such file."""
    try:
        return TypeAdapter(Results).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise Unreadable(_first_problem(error)) from None


def _first_problem(error: ValidationError) -> str:
    first: dict[str, Any] = dict(error.errors()[0])
    where: Sequence[object] = first["loc"]
    return f"{' / '.join(map(str, where)) or 'the file'}: {first['msg']}"
