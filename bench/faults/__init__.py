"""Faults, one after the other, on real processes under load: what clients see of each, and when all is right again.

python -m bench.faults       measures, and writes docs/faults.md

table       every fault, by name                          fault       what one is: a name, a sentence, what it does
stage       Redis, replicas, agents, gateways             program     a process that is killed, frozen, slowed
redis       the Redis of a stage, or three with sentinels proxy       a link that is cut, held, slowed
load        clients, and the balancer before the gateways verdicts    what is to be said of a request
watch       when all is right again                       quiet       what must hold once nobody asks any more
measure     one fault, from an empty cluster to its row   row         what was found, held against the goals
results     what was measured before                      page        docs/faults.md
"""
