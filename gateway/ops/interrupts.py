"""Ctrl-C while the command `kvgate` imports what it needs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_interrupts() -> Iterator[None]:
    """Inside the context, Ctrl-C ends the process without a traceback. In the background of a script it is ignored, and
    stays so."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
