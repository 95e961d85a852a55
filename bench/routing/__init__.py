"""Compares routing: KVGate's policies, an oracle, perfect pinning and other routers, side by side."""
