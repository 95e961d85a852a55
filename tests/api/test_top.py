"""`kvgate top` in a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios

import pytest

from tests.api.stage import Stage
from tests.polling import Patience


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_a_key_ends_it_and_the_terminal_is_as_before(stage: Stage, key: bytes) -> None:
    master, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    command = (sys.executable, "-P", "-m", "gateway.ops.cli", "top", "--gateway", stage.gateways[0])
    shown, patience = b"", Patience(30)
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, preexec_fn=_owns_terminal
    ) as process:
        while process.poll() is None and not patience.is_over():
            if select.select([master], [], [], 0.1)[0]:
                shown += os.read(master, 65536)
            if key and b"in flight" in shown:  # of the first lines: the terminal may be too small for others
                os.write(master, key)
                key = b""
        process.kill()
    assert process.returncode == 0
    assert termios.tcgetattr(terminal) == before
    os.close(master)
    os.close(terminal)


def _owns_terminal() -> None:
    """Makes standard input the terminal of its session, so that Ctrl-C interrupts it."""
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
