"""Pickers beside a gateway, in front of three replicas, and a real Envoy that asks them."""
