"""Which replicas there are, whether they live, and what they serve."""
