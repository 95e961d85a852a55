"""`kvgate` for the shells of tests: the server of tests/forked.py forks the command. This process passes signals on to
it, and ends as it ends.

    python -IS tests/forked_kvgate.py WORDS...

It imports little: shells of one test call `kvgate` a dozen times.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys

_STATUS = struct.Struct("!i")


def main() -> int:
    request = {
        "command": [sys.executable, "-P", "-m", "gateway.ops.cli", *sys.argv[1:]],
        "env": dict(os.environ),
        "cwd": os.getcwd(),  # noqa: PTH109
        "new_session": False,
        "fds": [0, 1, 2],
    }
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ["KVGATE_FORK_SERVER"])
        socket.send_fds(server, [_STATUS.pack(len(text))], [0, 1, 2])
        server.sendall(text)
        (pid,) = _STATUS.unpack(server.recv(_STATUS.size, socket.MSG_WAITALL))
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda told, _: os.kill(pid, told))
        (code,) = _STATUS.unpack(server.recv(_STATUS.size, socket.MSG_WAITALL))
    return int(code) if code >= 0 else 128 - int(code)


if __name__ == "__main__":
    sys.exit(main())
