"""The tests' Kubernetes API server as a program, on the port and with the certificate that pods expect.

    python -m tests.deploy.api_server FOLDER SLICE…

`FOLDER` contains tls.crt and tls.key. Each `SLICE` is the arguments of `KubernetesApi.put` in JSON.
"""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import sys
from pathlib import Path

from tests.gateway.replicas.discovery.kubernetes_api import running_kubernetes


async def main(folder: Path, endpoint_slices: list[str]) -> None:
    told_to_stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_stop.set)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    async with running_kubernetes(tls, port=443) as api:
        for endpoint_slice in endpoint_slices:
            await api.put(**json.loads(endpoint_slice))
        await told_to_stop.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
