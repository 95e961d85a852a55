"""The watch over the Redis that coordination and LMCache's chunks share, by one process at a time.

watcher      connection and lease                 tenure       what its holder knows and does: samples, chunks, INFO
listener     what Redis tells of sets and evictions   rota     which chunk is to be looked at when
key_samples  random keys as a sample: whose they are, and how much memory each kind takes
"""
