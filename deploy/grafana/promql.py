"""Expressions that most panels use."""

from __future__ import annotations

from deploy.grafana.panels import Variable

JOB = 'job=~"$job"'
REPLICA = f'{JOB},replica=~"$replica"'
ENGINE = 'job=~"$engines"'

JOBS = Variable("job", "kvgate_requests_in_flight", "job")
POOLS = Variable("pool", f"kvgate_replica_info{{{JOB}}}", "pool")
REPLICAS = Variable("replica", f'kvgate_replica_info{{{JOB},pool=~"$pool"}}', "replica")
"""Selects the chosen pools."""
ENGINES = Variable("engines", "vllm:num_requests_running", "job")
PATHS = Variable("path", f"kvgate_requests_total{{{JOB}}}", "path")


def rate(metric: str, by: str = "", where: str = JOB) -> str:
    """The rate per second, summed over gateways."""
    return f"sum{_by(by)} (rate({metric}{{{where}}}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """A ratio between 0 and 1."""
    return f"{part} / {whole}"


def share_of(metric: str, which: str, where: str = JOB) -> str:
    """The part of a counter with these labels. It is 0, and not missing, if there are none."""
    whole = rate(metric, where=where)
    return f"({rate(metric, where=f'{where},{which}')} or 0 * {whole}) / {whole}"


def mean(histogram: str, where: str = JOB, by: str = "") -> str:
    return f"{rate(f'{histogram}_sum', by, where)} / {rate(f'{histogram}_count', by, where)}"


def quantile(q: float, histogram: str, by: str = "", where: str = JOB) -> str:
    """A quantile of a histogram, interpolated within a bucket."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels, where)})"


def told(metric: str, by: str = "replica", where: str = REPLICA) -> str:
    """A metric of the cluster, which every gateway exports with the same value."""
    return f"max{_by(by)} ({metric}{{{where}}})"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
