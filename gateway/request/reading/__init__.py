"""Reads a request's body: what the gateway has to know of it.

    document       a JSON body: checks it, reads its prompt, makes it fit for a replica
    structure      counts the values of a JSON body before it is parsed
    form           a multipart form, the same way
    media          media in bodies whose prompt is not read
    workers        processes that read bodies which would hold the event loop for too long
    process_turns  which client's body a worker process reads next
    process        the code that runs in such a process

Only `workers` and `process` do I/O. A worker process imports this package without `workers`, so it starts in a third of
the time and takes half the memory.
"""

from gateway.request.reading.document import Ask, Body, Reading, Resolve, Rules, read_body

__all__ = ["Ask", "Body", "Reading", "Resolve", "Rules", "read_body"]
