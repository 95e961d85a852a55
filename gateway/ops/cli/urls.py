"""URLs on the command line."""

from __future__ import annotations

from gateway.ops.cli.errors import CommandError


def base_url(option: str, url: str) -> str:
    """The URL of a server that `option` names, without its last slash; a CommandError says what it must look like."""
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"{option}: is {url!r}; must be a URL, like http://10.0.0.7:8080")
    return url.rstrip("/")
