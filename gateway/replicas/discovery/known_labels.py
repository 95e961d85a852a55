"""The labels of objects in Kubernetes that gateways understand."""

from __future__ import annotations

import structlog

from gateway.logs import RareWarning
from gateway.replicas.discovery.api_server import Metadata
from gateway.settings.base import BOOTSTRAP_PORT_LABEL, ROLE_LABEL, checked_labels

_log = structlog.get_logger("kvgate.discovery")


class KnownLabels:
    """Reads them. `whose` they are: a pod's, or a Service's, which Kubernetes copies to its EndpointSlices."""

    def __init__(self, whose: str) -> None:
        self._wrong_label = RareWarning(_log, f"{whose} has a wrong label")

    def of(self, told: Metadata) -> dict[str, str]:
        """None of them, and a warning, if one is wrong."""
        known, labels = (ROLE_LABEL, BOOTSTRAP_PORT_LABEL), told.labels or {}
        try:
            return checked_labels({name: labels[name] for name in known if name in labels})
        except ValueError as error:
            self._wrong_label.warn(name=told.name, problem=str(error))
            return {}
