"""The options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option

DEFAULT_STATE_DIR = Path(".kvgate")
OF_CLUSTER = "the state directory's cluster"
"""The default of what is asked."""
StateDir = Annotated[Path, Option(metavar="DIR", help="The folder with the cluster's files and logs.")]
Gateway = Annotated[str | None, Option(metavar="URL", help="A gateway's own address.", show_default=OF_CLUSTER)]


def usable_key(key: str | None) -> str | None:
    """An API key, which is sent in a header. Raises BadParameter for one that no header takes."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise BadParameter("the API key in KVGATE_API_KEY or --api-key must be printable ASCII, to fit in a header")
    return key


ApiKey = Annotated[
    str | None,
    Option(
        envvar="KVGATE_API_KEY",
        callback=usable_key,
        help="Your API key, where gateways ask for one. Most commands need an admin's.",
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print JSON for programs.")]
REDIS_URL = Option(envvar="KVGATE_REDIS_URL", metavar="URL", help="The Redis that gateways share; rediss:// for TLS.")
REDIS_NAMESPACE = Option(
    envvar="KVGATE_REDIS_NAMESPACE",
    metavar="NAME",
    help="The gateways' redis.namespace, if several clusters share the Redis.",
)
