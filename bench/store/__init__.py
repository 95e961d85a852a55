"""The capacity of one Redis as the store of all gateways.

saturation   placements/s with Redis busy
latency      of placements beside other work on the same Redis
memory       the map's memory, and the effect of its size
beside       processes that use Redis during a measurement
requests     the gateways' requests in all of these
"""
