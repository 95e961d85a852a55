"""How well requests are routed: KVGate's policies, an oracle, perfect pinning and other routers, side by side."""
