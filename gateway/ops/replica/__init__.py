"""`kvgate replica-command`: the commands of one replica, which are vLLM, the LMCache server beside it, and the agent.

    settings         the file (configs/replica-*.yaml) as one frozen object
    sharing          chunk sizes and timeouts for a Redis that LMCache shares with KVGate
    commands         from settings to commands, with environment and arguments, for a program or a shell
    vllm             the arguments of `vllm serve`
    lmcache_options  the arguments of `lmcache server`

It starts nothing, and reads no file but the settings.
"""
