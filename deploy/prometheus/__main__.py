"""`python -m deploy.prometheus` writes rules/*.yml as the PrometheusRules of deploy/kubernetes/monitoring.

Prometheus and its operator use the same form for rules, so each file's text is copied unchanged, with its comments.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

_HERE = Path(__file__).parent
FILE = _HERE.parent / "kubernetes" / "monitoring" / "prometheus-rules.yaml"
_HEAD = "# From deploy/prometheus/rules, by `python -m deploy.prometheus`: change them there.\n"
_RULE = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {name}
  namespace: kvgate
spec:
"""


def text() -> str:
    """The content of FILE."""
    rules = sorted((_HERE / "rules").glob("*.yml"))
    objects = (_RULE.format(name=file.stem) + textwrap.indent(file.read_text(), "  ") for file in rules)
    return _HEAD + "---\n".join(objects)


if __name__ == "__main__":
    FILE.write_text(text())
