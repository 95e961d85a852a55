"""HTTP/1.1 towards clients: each connection carries one exchange of request and answer at a time.

protocol  a client's connection, for uvicorn's server
parser    from bytes to requests, and what is refused as malformed
exchange  one request and its answer
cors      lets web pages of other origins call
hosts     answers only who calls the gateway by a name of its own
asgi      lets an ASGI application answer an exchange
pieces    gathers bytes that come in pieces
"""
