"""The first lines of the command `kvgate`. Its imports take a moment: until then, Ctrl-C ends it in silence."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # in the background of a script it is ignored, and stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gateway.ops.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()
