"""A request's way to a replica and its answer's way back."""
