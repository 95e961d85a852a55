"""The agent: the sidecar beside one replica that turns its engine's KV events into the map's residency.

agent            follows the engine from one process to the next     http_engine     what the engine tells over HTTP
engine_session   follows one process: events in, transitions out     agent_store     what is published and read in Redis

feed             batches of events over ZMQ, live and replayed       batch_sequence  their order: gaps and restarts
kv_events        vLLM's event payloads, decoded                      blocks          the blocks that the engine holds
chains           where in its blocks each prefix key ends            token_sizes     how much text each token stands for
residency        blocks and chains in, transitions of keys out

tier_reporter    LMCache's chunk names and what a load saves         chunk_index     the names, from blocks
rates            the saving, from the engine's counters
"""
