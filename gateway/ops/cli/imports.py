"""How a command that runs for long imports what it needs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def for_good() -> Iterator[None]:
    """Modules live as long as the process: collections of garbage among them take a fifth of its start and find none.
    Neither does a later one look at them. structlog would import rich for tracebacks that logs.py does not show."""
    modules: dict[str, Any] = sys.modules
    gc.disable()
    modules.setdefault("rich", None)  # refuses its import
    try:
        yield
    finally:
        if modules["rich"] is None:
            del modules["rich"]
        gc.freeze()
        gc.enable()
