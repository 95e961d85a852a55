"""The gain from KV that is kept outside the GPU: vLLM alone, LMCache in CPU memory, LMCache directly on Redis.

scenarios   the requests, and where others used the same ones
published   the results of others
stages      one replica with a tier, simulated or real
measure     one run
"""
