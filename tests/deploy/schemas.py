"""The schemas of manifests: those of the Kubernetes API, of the Prometheus Operator and of KEDA, from PyPI."""

from __future__ import annotations

import functools
import json

import kubernetes_validate
import pydantic

from tests.deploy.manifests import Document

# The version that README.md requires, and the newest with schemas.
VERSIONS = ("1.30", kubernetes_validate.latest_version())


@functools.cache
def _of_operators() -> dict[str, type[pydantic.BaseModel]]:
    """The operators' models. Imported here because the import takes seconds."""
    from cloudcoil.models.keda.v1alpha1 import ScaledObject, TriggerAuthentication
    from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor

    models: tuple[type[pydantic.BaseModel], ...] = (ServiceMonitor, PrometheusRule, ScaledObject, TriggerAuthentication)
    return {model.__name__: model for model in models}


def problem(document: Document, version: str) -> str | None:
    """An object's error, also for unknown fields; None if it is valid."""
    return _problem(json.dumps(document), version)


@functools.cache
def _problem(text: str, version: str) -> str | None:
    """Each text is checked once, because the overlays have most objects in common."""
    document = json.loads(text)
    try:
        if model := _of_operators().get(document["kind"]):
            read = model.model_validate(document)
            # The model drops unknown fields.
            lost = read.model_dump(mode="json", by_alias=True, exclude_unset=True)
            return None if lost == document else f"{document} is read as {lost}"
        kubernetes_validate.validate(document, version, strict=True)
    except (kubernetes_validate.ValidationError, pydantic.ValidationError) as error:
        return f"{document['kind']} {document['metadata']['name']}: {error}"
    return None
