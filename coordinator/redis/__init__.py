"""The wire to Redis: addresses, connections, limits of time, INFO."""
