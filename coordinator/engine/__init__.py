"""Control requests to replicas, and what their engines tell over HTTP.

control_client   sends the requests, and limits their time and their answers
facts            models, cache size, start time and counters of an engine
lmcache_server   chunk names and load speeds of an LMCache server
light_json       which JSON is cheap enough to parse
sockets          socket options that notice a gone host
"""
