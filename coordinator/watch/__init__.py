"""The watch over the Redis that coordination and LMCache's chunks share. One process at a time does it.

    watcher         the connection and the lease
    watch_session   what the holder of the lease does: listen to events, look after chunks, sample keys, judge Redis
    store_report    what it has found, for all gateways: it stands in the lease
    chunk_schedule  when to look at which chunk
    key_samples     random keys as a sample: whose they are, and how much memory each kind takes

The checks that it runs are those of coordinator/redis/checks.py.
"""
