"""The schemas of manifests. Those of the Kubernetes API, the Prometheus Operator, KEDA and Istio come from PyPI. No
package has that of an InferencePool: it is written here, after the reference of its API."""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any, Literal

import kubernetes_validate
import pydantic
from pydantic import Field

from tests.deploy.manifests import Document

# The version that README.md requires, and the newest with schemas.
VERSIONS = ("1.30", kubernetes_validate.latest_version())

ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class _Port(_Strict):
    number: Annotated[int, Field(ge=1, le=65535)]


class _Selector(_Strict):
    matchLabels: Annotated[dict[str, str], Field(min_length=1, max_length=64)]


class _PickerRef(_Strict):
    group: Literal[""] = ""
    kind: Literal["Service"] = "Service"
    name: ObjectName
    port: _Port
    failureMode: Literal["FailClose", "FailOpen"] = "FailClose"


class _PoolSpec(_Strict):
    selector: _Selector
    targetPorts: Annotated[list[_Port], Field(min_length=1, max_length=8)]
    appProtocol: Literal["http", "kubernetes.io/h2c"] = "http"
    endpointPickerRef: _PickerRef


class InferencePool(_Strict):
    """An InferencePool that has an endpoint picker, for which a Service is the only kind."""

    apiVersion: Literal["inference.networking.k8s.io/v1"]
    kind: Literal["InferencePool"]
    metadata: dict[str, Any]
    spec: _PoolSpec


@functools.cache
def _of_operators() -> dict[str, type[pydantic.BaseModel]]:
    """The operators' models. Imported here because the import takes seconds."""
    from cloudcoil.models.istio.networking.v1 import DestinationRule
    from cloudcoil.models.keda.v1alpha1 import ScaledObject, TriggerAuthentication
    from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor

    models: tuple[type[pydantic.BaseModel], ...] = (
        *(ServiceMonitor, PrometheusRule, ScaledObject, TriggerAuthentication),
        *(DestinationRule, InferencePool),
    )
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
