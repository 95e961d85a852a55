"""An endpoint picker for other gateways: Envoy asks it where a request goes (`kvgate picker`).

A picker is a gateway whose near end and far end are one: the call of an Envoy that has both the client and the replica.
All between the two ends is a gateway's own: admission, reading, placing, waiting, retries, charges, records.

    gateway    composes it: a gateway that also listens for calls
    service    listens: gRPC, TLS, health
    call       one call: passes what Envoy says to both ends, and what both ends say to Envoy
    exchange   the near end: a client's request, and its answer
    far_end    the far end: a replica behind Envoy
    passing    the attempt for answers that Envoy passes without showing them
    words      what Envoy's messages say. Pure
    messages   the messages themselves

Source of the protocol: Envoy's external_processor.proto, and the endpoint picker protocol 1.0 of the Gateway API's
inference extension (docs/proposals/004-endpoint-picker-protocol there).
"""
