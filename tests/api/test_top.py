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


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_a_key_ends_it_and_the_terminal_is_as_before(stage: Stage, key: bytes) -> None:
    master, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    command = (sys.executable, "-P", "-m", "gateway.ops.cli", "top", "--gateway", stage.gateways[0])
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, preexec_fn=_owns_terminal
    ) as process:
        shown = b""
        while b"last decisions" not in shown:
            shown += os.read(master, 65536)
        os.write(master, key)
        while process.poll() is None:  # it draws its farewell, which somebody has to read
            if select.select([master], [], [], 0.1)[0]:
                os.read(master, 65536)
    assert process.returncode == 0
    assert termios.tcgetattr(terminal) == before
    os.close(master)
    os.close(terminal)


def _owns_terminal() -> None:
    """Makes standard input the terminal of its session, so that Ctrl-C interrupts it."""
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
