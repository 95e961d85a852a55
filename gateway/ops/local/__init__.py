"""A whole cluster on one machine: `kvgate up`, `down` and `status`.

    cluster         starts Redis, replicas, agents and gateways in that order, and waits until they can serve
    plan            the options of `up`, and the configuration of each gateway
    processes       child processes: start, watch, stop
    bound_process   makes a process die with the one that started it
    embedded_redis  finds a redis-server to embed, and checks that a running Redis can be used
    probes          asks gateways and replicas whether they can serve
    waiting         messages while the cluster starts, and when it does not
    ports           free ports, and the locks that keep two clusters apart
    state_dir       cluster.json for programs, processes.json for `down`, the gateways' configurations
    cluster_status  which members of a cluster answer; stopping a detached one
    demo            the first requests of a new cluster

For laptops and tests, and for Linux only (a process is identified by its start time in /proc). Nothing here restarts a
process that dies: an orchestrator does that, and tests kill processes to see how the others react.
"""
