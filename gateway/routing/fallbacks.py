"""Another model answers when the one that a client asked for cannot, as the configuration allows."""

from __future__ import annotations

from gateway.replicas.fleet import Fleet
from gateway.request.job import Job
from gateway.settings.model_settings import FallbackSettings


class Fallbacks:
    """The fallbacks of one gateway."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def is_due(self, job: Job) -> bool:
        """Whether no replica of the request's model is ready, and another model may answer."""
        route = job.route
        return bool(route.fallbacks) and not route.pinned and not self._has_ready(job, route.placed_as)

    def next(self, job: Job) -> bool:
        """Aims the request at the next model that may answer it and has a ready replica. False if there is none."""
        route = job.route
        while route.fallbacks and not route.pinned:
            told = route.next_fallback()
            if job.caller.may_use(told.model) and permits(told, job) and self._has_ready(job, told.model):
                route.fall_back(told.model, self._fleet)
                return True
        return False

    def _has_ready(self, job: Job, model: str | None) -> bool:
        """One that takes a prompt and answer of this length."""
        return any(
            self._fleet.is_ready(replica)
            for backend in self._fleet.backends(model)
            if backend.takes(job.route.needed_tokens, ())
            for replica in backend.replicas
        )


def permits(fallback: FallbackSettings, job: Job) -> bool:
    """Whether the configuration lets this request go there."""
    has_media = bool(job.images)
    is_short = fallback.max_tokens is None or job.route.needed_tokens <= fallback.max_tokens
    return is_short and (fallback.images or not has_media) and (fallback.tools or not job.has_tools)
