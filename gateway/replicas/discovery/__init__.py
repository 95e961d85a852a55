"""Where replicas are, besides those that are listed.

    settings    what can be followed: DNS names, a Kubernetes service
    source      what following means, and what an address makes a replica called
    dns         addresses, or SRV records, of names
    kubernetes  EndpointSlices of the API server
    discovery   the listed replicas and those found, each engine once

Only this gateway's own: what it finds is what it sends requests to (see docs/adr/0008-discovery.md).
"""
