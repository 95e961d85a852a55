"""Finds replicas that are not listed in the configuration.

    source      what every source has in common, and how it names a replica by its address
    dns         addresses, or SRV records, of names
    kubernetes  EndpointSlices of the API server
    discovery   joins the listed replicas and those found; each engine counts once

Each gateway uses what it finds itself (see docs/adr/0008-discovery.md).
"""
