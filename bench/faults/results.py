"""Results of earlier runs. A run continues where the last one ended."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import orjson

from bench.faults.row import Row, Section, row_of

FILE = Path("bench/results/faults.json")
_ROOT = Path(__file__).parents[2]
_MEASURED = ("gateway", "coordinator")
_SUFFIXES = (".py", ".lua")


def code() -> str:
    """A digest of the measured code. Changes elsewhere, for example to results or documents, require no new
    measurement."""
    digest = blake2b(digest_size=6)
    for folder in _MEASURED:
        for file in sorted(path for path in (_ROOT / folder).rglob("*") if path.suffix in _SUFFIXES):
            digest.update(str(file.relative_to(_ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def read(file: Path) -> list[Row]:
    """Empty if there is no file. Raises ValueError if the file is not a results file."""
    if not file.exists():
        return []
    try:
        return [row_of(told) for told in orjson.loads(file.read_bytes())["rows"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} has other columns: {error}; move it away, and measure again") from error


def to_measure(wanted: Iterable[str], section: Section, code: str, rows: Iterable[Row], again: bool) -> list[str]:
    """The wanted faults that these rows do not have yet in this section."""
    known = {(row.fault, row.section, row.code) for row in rows if not row.skipped}
    return [name for name in wanted if again or (name, section, code) not in known]


def put(rows: list[Row], row: Row, order: list[str]) -> None:
    """Puts the row in the place of an older one, sorted by section and this order of faults."""
    rows[:] = [other for other in rows if (other.fault, other.section) != (row.fault, row.section)]
    rows.append(row)
    places = {name: place for place, name in enumerate(order)}
    rows.sort(key=lambda one: (one.waits, one.replicas, one.gateways, places.get(one.fault, len(order))))
