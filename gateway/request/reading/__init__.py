"""Reads a request's body: a `BodyHead` and a body give a `ParsedBody`.

    document          reads a JSON body: checks it, reads its prompt, makes it fit for a replica
    output            how much an engine generates for a body, at most
    resumable         whether a stream could go on at another replica after it broke
    edit              changes a JSON text in a few places
    form              reads a multipart form
    model_field       finds the model in JSON text that is not parsed
    structure         counts the values of a JSON body before it is parsed
    media             checks the media in bodies whose prompt is not read in full
    body_readers      starts the processes that read large bodies, and talks to them
    worker_process    runs in such a process

Only `body_readers` and `worker_process` do I/O. A worker process imports this package without `body_readers`, so that
it starts in a third of the time and takes half the memory.
"""

from gateway.request.reading.document import Body, BodyHead, BodyRules, ParsedBody, ResolveScopes, read_body

__all__ = ["Body", "BodyHead", "BodyRules", "ParsedBody", "ResolveScopes", "read_body"]
