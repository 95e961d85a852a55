"""The paths that a gateway answers itself: health, readiness, version, metrics, models, explain,
replicas."""
