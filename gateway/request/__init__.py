"""A client's request: whether it is let in, its body, and what that says."""
