"""Fleets of up to 1 000 replicas and 50 gateways on one machine: real gateways, a real Redis, light replicas.

A light replica answers a gateway as the simulated replica (gateway/simulator) does, for a fraction of its CPU time.
Hundreds of them are one process. Where to look:

    __main__     `python -m bench.fleet`: the options, the runs, the table

    settings     the size and the speed of a light replica
    engine       its block cache and its timing model
    exchange     one HTTP request to it
    agents       its agent, which publishes its KV events to Redis
    replicas     the process of light replicas, and how to start it
"""
