"""What a replica and the servers beside it tell over HTTP, for gateways and agents.

facts            models, cache size, start time and counters of an engine
kv_transfers     the engine's connectors, and what became of KV for other engines
lmcache_server   chunk names and load speeds of an LMCache server
light_json       parses JSON answers, if that is cheap
sockets          socket options that notice a gone host
"""
