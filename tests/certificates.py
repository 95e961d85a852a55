"""Certificates for the tests' own servers."""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Sequence
from pathlib import Path


def self_signed(folder: Path, name: str, host: str, key_options: Sequence[str] = ("rsa:2048",)) -> tuple[Path, Path]:
    """A self-signed certificate for a host's name or address, and its key: `<name>.crt` and `<name>.key`."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    try:
        kind = f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        kind = f"DNS:{host}"
    who = ("-subj", f"/CN={host}", "-addext", f"subjectAltName={kind}", "-days", "2")
    command = ["openssl", "req", "-x509", "-newkey", *key_options, "-nodes", *who, "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
