"""The commands of one replica: vLLM, the LMCache server beside it, the agent.

    settings    the file (configs/replica-*.yaml) as one frozen object
    model_size  what a token's KV takes on one GPU, from a model's config.json
    sharing     chunks and timeouts, so that a store shared with KVGate stays quick and a stopped one is no standstill
    commands    settings to commands: environment and arguments, for a program or a shell
    vllm, lmcache, agent    the arguments of each

Everything here is pure but for reading a model's config.json. Nothing is started.
"""
