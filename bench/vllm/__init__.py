"""Real vLLM on a machine without a GPU: its installation, small models with random weights, replicas as processes."""
