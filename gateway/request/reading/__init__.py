"""From a request's body to what the gateway has to know of it.

    document     a JSON body: checked, its prompt read, made fit for a replica
    structure    how many values a JSON body holds, counted before it is parsed
    form         a multipart form, the same way
    media        media in bodies whose prompt is not read
    workers      processes that read what would hold the event loop for too long, and whose turn it is (`turns`)
    process      what runs in such a process

Nothing here does I/O but `workers` and `process`. A worker process imports this package without `workers`: so it starts
in a third of the time, and takes half the memory.
"""

from gateway.request.reading.document import Ask, Body, Reading, Resolve, Rules, read_body

__all__ = ["Ask", "Body", "Reading", "Resolve", "Rules", "read_body"]
