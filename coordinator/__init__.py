"""The shared state: everything that the gateways agree on, in one Redis. README.md beside this file is the data model.

keys              how every key is spelled
subset            the replicas that serve one model name, and their digest
registry          the records of replicas and agents, and the state of a pool that a heartbeat returns
policy_knobs      how a gateway wants placements to be chosen
accounts          whom a request is charged to, and their limits
spending          the budgets of accounts, and what a request can cost
placement         what a placement asks, and how it is answered
scripts           the Lua scripts: their texts, and how each is called
lua/              the text of the scripts; policies/ has one for each policy, steps/ for each step of `place`
signature         the header of a script: which KEYS and ARGV it takes
store             the connections of a process; hands out a Pool for each base model
store_connection  one connection to the store: up or down, and what follows from it
errors            what can go wrong with the store
breaker           when the breaker of a replica opens, and for how long
redis/            the connection itself: addresses, pipelining, limits of time, INFO
pool/             one pool as one gateway uses it: placing, ownership, and what answers teach
maintenance/      what one process does for all: trimming, reaping, checking records
agent/            the process beside a replica: reads its engine's events and says what the replica holds
engine/           what an engine says of itself: its metrics and its LMCache server
watch/            looks after a Redis that chunks fill: TTLs, evictions, memory
lmcache_chunks    the names of LMCache's chunks in Redis, from a prompt's tokens
records           what operators keep in the store: keys, and who changed them
usage             the ledger of usage: what requests took, by hour, tenant, key and model
decision_ring     the last records of requests, in a bounded ring
known_pools       which pools a cluster has
finding           the words of a finding: severity, why, fix; the watch and the doctor share them
survey            what a Redis and the pools in it tell of themselves, for the doctor
"""
