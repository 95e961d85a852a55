"""`kvgate doctor`: what is wrong with a running cluster, and what to do about it.

gather     asks Redis, gateways, replicas and LMCache, and changes nothing  (replicas, servers, endpoints: how)
facts      what came of it
*_checks   small functions from facts to findings, one for each thing that can be wrong  (Redis and the chunks in it:
           coordinator/redis/checks.py, which the watch shares)
examine    makes all of them
page       docs/doctor.md, made of the findings there can be
"""
