"""A whole cluster on one machine: what `kvgate up`, `down` and `status` do.

    cluster    starts Redis, replicas and gateways in that order, and knows when they can serve
    plan       what was asked for, and the configuration each gateway gets
    processes  child processes: start, watch, stop
    bound      makes a process die with the one that started it
    redis      finds a redis-server to embed, and asks a running one whether it will do
    probes     asks gateways and replicas whether they can serve
    waiting    what is said until all of it can serve
    ports      free ports, and the locks that keep two clusters apart
    state      cluster.json for programs to read, processes.json for `down`
    status     what of a cluster answers
    demo       the first two requests

For laptops and tests; Linux only (processes are told apart by /proc). Nothing here restarts what dies: that is an
orchestrator's job, and tests kill processes to see what the others do.
"""
