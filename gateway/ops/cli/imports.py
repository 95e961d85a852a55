"""Imports of commands that run for a long time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway.ops.interrupts import silent_interrupts


@contextmanager
def long_lived_imports() -> Iterator[None]:
    """Makes the imports in its block faster, and lets later garbage collections skip the imported modules.

    Modules live as long as the process. So collections during imports find nothing, and take a fifth of the start.
    Ctrl-C in the middle of an import ends the process in silence: a traceback would tell nobody anything.

    structlog imports rich, if rich is installed, for tracebacks that logs.py does not use. The block hides rich.
    """
    modules: dict[str, Any] = sys.modules
    gc.disable()
    modules.setdefault("rich", None)  # None makes `import rich` fail
    try:
        with silent_interrupts():
            yield
    finally:
        if modules["rich"] is None:
            del modules["rich"]
        gc.freeze()
        gc.enable()
