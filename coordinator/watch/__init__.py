"""The watch over the Redis that coordination and LMCache's chunks share, by one process at a time.

watcher      connection and lease                 tenure       what its holder knows and does: samples, chunks, INFO
kinds        whose a key is, by its name          rota         which chunk is to be looked at when
listener     what Redis tells of sets and evictions   figures  INFO and samples, as numbers
conditions   what an operator should do something about
"""
