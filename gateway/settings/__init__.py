"""A gateway's settings: their file, their checks, their defaults."""
