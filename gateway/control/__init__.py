"""The paths that a gateway answers itself: health, metrics, models, explain."""
