"""What one Redis carries, as the store of all gateways.

saturation   placements/s with Redis busy                latency   of placements beside other work on the same Redis
memory       what the map takes, and what its size costs beside    processes that use Redis while something is measured
requests     what gateways ask for in all of it
"""
