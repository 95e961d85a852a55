"""Finds replicas that are not listed in the configuration.

    source          the interface of a source, and the id of a replica that was found
    dns             addresses or SRV records of DNS names
    api_server      lists and watches objects of the Kubernetes API
    known_labels    the labels of these objects that gateways understand
    kubernetes      EndpointSlices
    inference_pool  an InferencePool of the Gateway API, and its pods
    added           those that operators add while the gateways run: signed records in Redis
    discovery       the listed replicas and those found, each engine once

Each gateway sends requests only to the replicas that it finds itself (docs/adr/0008-discovery.md).
"""
