"""How a command that runs for long imports what it needs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def for_good() -> Iterator[None]:
    """Modules live as long as the process: collections among them take a fifth of its start and find nothing.
    Neither those here nor later ones look at them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
