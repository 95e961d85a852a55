"""The replicas that a gateway knows: whether they are alive and make progress, and which models they serve."""
