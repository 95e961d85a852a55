"""Finds replicas that are not listed in the configuration.

    source      the interface of a source, and the id of a replica that was found
    dns         addresses or SRV records of DNS names
    kubernetes  EndpointSlices of the Kubernetes API
    added       those that operators add while the gateways run: signed records in Redis
    discovery   the listed replicas and those found, each engine once

Each gateway sends requests only to the replicas that it finds itself (docs/adr/0008-discovery.md).
"""
