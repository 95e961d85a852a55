"""`kvgate top` in a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios

from tests.api.stage import Stage
from tests.polling import Patience


def test_q_ends_it_and_the_terminal_is_as_before(stage: Stage) -> None:
    master, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    command = (sys.executable, "-P", "-m", "gateway.ops.cli", "top", "--gateway", stage.gateways[0])
    shown, patience, key = b"", Patience(30), b"q"
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True) as process:
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
