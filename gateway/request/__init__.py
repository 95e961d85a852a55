"""A client's request: admitted, received and read. The result is a `Job`, which `routing/` places and `relay/` sends.

A request passes these files in this order:

    keyring      identifies the caller by its API key
    paths        decides which paths may reach a replica, and how they are written there
    admission    limits uploads, requests in flight and held bytes
    fairness     limits how much of that one client takes while others want some
    body         receives the body
    objectives   the priorities that InferenceObjectives give to requests
    reader       reads the request into a `Job`
    job          what the client asks for
    route        where the request goes, which changes between its attempts
    reading/     parses and checks the body; a worker process reads large bodies
    memory       returns the memory of large bodies to the system
"""
