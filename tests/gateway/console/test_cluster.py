"""What the console says is wrong."""

from __future__ import annotations

from gateway.console.cluster import problems_in


def test_a_backend_without_replicas_is_a_problem_unless_its_whole_model_is_down() -> None:
    missing = {"chat": ["v2", "v3"], "lone": ["v1"]}
    told = problems_in(
        {
            "reasons": [],
            "models_down": ("lone", "big"),
            "answered_by_fallback": {"big": ["small"]},
            "backends_without_replicas": missing,
        }
    )
    assert told == [
        {"where": "model lone", "what": "no replica is ready for it"},
        {"where": "model big", "what": "no replica is ready for it; small may answer"},
        {"where": "model chat", "what": "no replica is ready for the backend v2, v3"},
    ]
