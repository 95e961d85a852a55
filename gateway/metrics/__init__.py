"""What a gateway counts, for Prometheus."""
