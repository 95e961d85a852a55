"""The agent: the sidecar beside one replica that turns its engine's KV events into the map's residency.

agent               follows the engine from one process to the next
engine_session      follows one process: events in, transitions of keys out
http_engine         what the engine tells over HTTP
control_client      sends its requests, and limits their time and their answers
agent_store         what the agent publishes and reads in Redis
restatement         everything that a replica holds, said again in pieces
event_delay         how long events take to the map

feed                batches of KV events over ZMQ, live and replayed
batch_sequence      the order of the batches: gaps, replays, restarts
kv_events           vLLM's event payloads, decoded

blocks              the blocks that the engine holds
chains              where in a prompt's blocks each prefix key ends
token_sizes         how much text each token stands for
residency           blocks and chains in, transitions of keys out

tier_reporter       tells how LMCache names chunks, and what a load saves
chunk_index         the names of chunks, found from blocks
rates               what a load saves, from the engine's counters
"""
