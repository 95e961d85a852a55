"""The agent: the sidecar beside one replica that turns its engine's KV events into what the map says.

agent        from one engine life to the next            life         one life: work events in, say what changed
feed         ZMQ: live batches and replays               sequence     their order: duplicates, gaps, restarts
events       vLLM's event payloads, decoded              blocks       which blocks the engine holds, and where
chains       where in its blocks each prefix key ends    tokens       how much text a token stands for
residency    blocks and chains: key transitions          inheritance  what the last agent knew
link         what is said to Redis, and asked of it      sight        what is seen of the engine over HTTP
"""
