"""The first lines of the command `kvgate`. Its imports take a moment: until then, Ctrl-C ends it in silence, and SIGHUP
does nothing to a gateway, which reads its files anyway."""

from __future__ import annotations

import signal
import sys

from gateway.ops.interrupts import silent_interrupts


def main() -> None:
    """Run the command."""
    if sys.argv[1:2] in (["gateway"], ["picker"]):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with silent_interrupts():
        from gateway.ops.cli import main as run
    run()
