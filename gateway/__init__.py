"""The gateway: HTTP in, HTTP out.

KVGate is five programs and one shared state. The shared state, and the agent beside a replica, are in coordinator/. The
rooms of this package (a file or a folder each) are the other four.

What a gateway runs, in the order in which a request meets it:

    server       the process: sockets, uvicorn, signals
    http/        HTTP/1.1 towards clients: connections, and one exchange of request and answer at a time
    app          builds all parts of a gateway once; sends each request to `relay/` or to `control/`
    endpoints    every API path, with everything that is known of it
    request/     reads a request: who calls, is there room, the body, what the body says
    prompt/      turns a prompt into a byte stream and its chain of prefix keys
    routing/     chooses a replica: by a placement in Redis, or by hashing while Redis is away
    relay/       sends a request to its replica, retries, and passes the answer on to the client
    upstream/    HTTP/1.1 towards replicas; nothing else speaks to them

And beside requests:

    records/     what operators keep in Redis, signed: API keys, replicas
    replicas/    which replicas there are, whether they live, and what they serve
    control/     the paths that a gateway answers itself: health, readiness, models, explain
    console/     the cluster on one page, live
    metrics/     what a gateway counts, for Prometheus
    tracing/     traces of requests, for an OpenTelemetry backend
    access_log   one line for each request
    billing/     what requests cost, and the ledger of usage
    settings/    the configuration file: its fields, checks and defaults
    reload       reads it again while the gateway runs
    errors       the exception that ends a request, in OpenAI's JSON shape
    tls          the certificates that clients and replicas see, loaded again when they change
    deadlines    time limits of requests, with one timer for all
    tasks        background tasks: keeps them, logs their failures, cancels them on close
    logs         structured logs without prompts, keys or headers

In the place of HTTP, for other gateways:

    picker/      answers Envoy's calls: where a request goes (`kvgate picker`)

What operators run:

    ops/         the command `kvgate`, clusters on one machine, commands for replica hosts
    doctor/      finds what is wrong with a running cluster, and says how to mend it; the console shows the same

What stands in for GPUs:

    simulator/   a server that behaves like vLLM, for tests and laptops

coordinator/README.md explains the words replica, prefix key, chain, tip, owner, claim, incarnation, reservation, place
and settle. A *job* is a client's request, as it was read; its *route* is where it goes. A *ticket* is one attempt of
one request: a placement and the reservation that goes with it.
"""


def __getattr__(name: str) -> str:
    """`__version__`, found when somebody asks: it takes some ms, and `kvgate` has to begin quickly."""
    if name != "__version__":
        raise AttributeError(name)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvgate")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"
