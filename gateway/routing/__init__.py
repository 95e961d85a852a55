"""Chooses a request's replica. The store chooses while it serves; otherwise all gateways use the same rule."""
