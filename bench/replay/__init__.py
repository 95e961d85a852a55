"""Replays recorded traffic: how much of what an endless cache would find does each router find?

trace    reads a recording, cuts and scales it, and computes the bound
roles    simulated replicas, some of which only compute prompts
prompts  makes each request's text from its block ids
measure  one run of the requests through a system
"""
