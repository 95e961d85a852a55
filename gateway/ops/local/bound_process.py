"""Runs a command that the kernel kills when the process that started it dies, even by SIGKILL.

    python -P -m gateway.ops.local.bound_process PARENT_PID COMMAND ARG…

The parent-death signal survives exec: the command keeps the pid that was started, and no wrapper stays behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    parent_pid, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent_pid):  # it died before the kernel was told
        sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606 - the command line is the local cluster's own


if __name__ == "__main__":
    main()
