"""What KV that is kept outside the GPU is worth: vLLM alone, LMCache in CPU memory, LMCache straight to Redis.

scenarios   what is asked, and where it was asked before
published   what others measured of it
stages      one replica with a tier, simulated or real
measure     one run
"""
