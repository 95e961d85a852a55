"""The gateway: HTTP in, HTTP out.

A request's way through this package, in order (each word is a file, or a folder, here):

    http/        a client's connection (`protocol`), and one request with its answer (`exchange`)
    app          proxied paths go to `proxy`, the rest to `control` (FastAPI)
    keyring      who is calling: API keys and tenants
    admission    is there room: uploads, requests in flight, bytes; and how much of it one client gets (`fairness`)
    body         the body, as it comes
    paths        which paths may reach a replica, and how they are spelled there
    reader       from the body to a `job`, ready to be placed
    reading/     what the body says, what must not reach the engine; in another process where that takes long
    prompt/      the prompt as a byte stream, and its chain of prefix keys
    routing/     where it goes: `router` asks the store for a placement, or falls back to `rendezvous`
    upstream/    the only module that speaks to replicas: a connection each, an answer as it arrives
    proxy        the request path, from the body to the answer; `attempt` places, sends and retries
    relay        an answer on its way back, and what it teaches
    held         how much of answers a request holds, counted with request bodies
    excerpts     what is read of JSON that is too large to be parsed
    error_shapes what an error looks like in the API of its path
    sse          what is looked at in a stream while its bytes go by
    audit        what the engine says it had cached, against what was predicted
    discovery/   where replicas are that are not listed: DNS names, a Kubernetes service
    fleet        the replicas that this gateway knows, and the models that they serve
    identity     whether a replica's record in the registry describes this gateway's engine
    health_checks  whether replicas are alive, and in which incarnation; registers that for all gateways
    moves        moves requests that wait for a first byte away from a replica that dies
    hangs        finds replicas that are alive and make no progress

Words (replica, prefix key, chain, tip, owner, claim, incarnation, reservation, place, settle) are those of
coordinator/README.md. A *ticket* is one attempt of one request: a placement and the reservation that goes with it.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvgate")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
