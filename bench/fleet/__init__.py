"""Fleets of up to 1 000 replicas and 50 gateways on one machine: real gateways, a real Redis, light replicas.

A light replica answers a gateway as the simulated replica (gateway/simulator) does, for a fraction of its CPU time.
Hundreds of them are one process. Where to look:

    __main__     `python -m bench.fleet`: the options, and which runs there are

    peer         a peer's run                        churn      workers that leave and come; long runs
    growth       the cost of one request             table      the tables
    traffic      the sessions of clients             load       sends them, and counts what came of them
    client       connections                         parts      the CPU and the memory of each part

    stage        Redis, light replicas and gateways together
    gateways     the gateways                        endpoints  the EndpointSlices that they may follow
    replicas     the process of light replicas       settings   the size and the speed of one
    engine       its block cache and its timing      exchange   one HTTP request to it
    agents       its agent, which publishes its KV events to Redis
"""
