"""The doctor's checks: pure functions from what was gathered to findings, in one file for each subject.

    gateways   gateways, and whether they agree
    replicas   one replica, and the replicas of a pool
    models     models and their backends
    pairs      roles of replicas, and whether prefill and decode work together
    agents     agents, and the events that they deliver
    clocks     clocks
    lmcache    LMCache's servers
    tenants    what a configuration says of tenants and their queue

Checks on Redis and on the chunks in it are in coordinator/redis/checks.py: the watch shares them. A new finding is a
`FindingKind` and a check in the file of its subject, and a case in tests/gateway/doctor/test_findings.py.
"""
