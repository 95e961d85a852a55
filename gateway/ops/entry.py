"""The first lines of the command `kvgate`. Its imports take a moment: until then, Ctrl-C ends it in silence."""

from __future__ import annotations

from gateway.ops.interrupts import silent_interrupts


def main() -> None:
    """Run the command."""
    with silent_interrupts():
        from gateway.ops.cli import main as run
    run()
