"""Compares routing: KVGate's policies, perfect pinning and other routers, side by side."""
