"""Faults, one after another, on real processes under load: what clients notice, and the time until all is right again.

python -m bench.faults       measures, and writes docs/evidence/faults.md

table       every fault by name                           fault       a fault: a sentence, a function, its goal
stage       Redis, replicas, agents, gateways             program     a process to kill, freeze or slow down
redis       one Redis, or three with sentinels            proxy       a link to cut, hold or slow down
load        clients, and the balancer before the gateways verdicts    the verdict on each request
problems    samples problems; when is all right again     quiet       checks after the load has ended
measure     one fault, from an empty cluster to its row   row         the result and the goals that it missed
queue       requests that wait: load, cap, checks         results     results of earlier runs
page        docs/evidence/faults.md
"""
