"""The connection to Redis: addresses, pipelining, limits of time, INFO."""
