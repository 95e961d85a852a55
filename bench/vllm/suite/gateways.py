"""Two gateways in front of one server: `python -m bench.vllm.suite.gateways URL`.

Prints the port of a gateway when it serves. Stops when its standard input is closed, so it ends with the process that
started it.
"""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

from bench.cluster import running_gateways

# The engine and the tests keep both cores busy: a placement may take longer than production's limit of 20 ms.
_CONFIG = {"redis": {"budget_ms": 500}, "health": {"timeout_s": 5}}


def main(url: str) -> None:
    with running_gateways({"r0": url}, gateways=2, config=_CONFIG) as cluster:
        print(urlsplit(cluster.gateway_urls[0]).port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
