"""Redis' answer to INFO."""

from __future__ import annotations


def read_fields(reply: bytes) -> dict[str, str]:
    """Its lines `name:value`, by name; the headings between them are left out."""
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
