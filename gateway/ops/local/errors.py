"""The one error of the local cluster."""

from __future__ import annotations


class ClusterError(Exception):
    """Something the user can act on; the message says what is wrong and what to do."""
