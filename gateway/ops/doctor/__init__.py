"""`kvgate doctor`: what is wrong with a running cluster, and what to do about it.

gather     asks Redis, gateways, replicas and LMCache, and changes nothing  (replicas, servers, endpoints: how)
facts      what came of it
*_checks   small functions from facts to findings, one for each thing that can be wrong  (chunks: those of LMCache)
examine    makes all of them
finding    what they say: a finding with its fix, or that something could not be checked
page       docs/doctor.md, made of the findings there can be
"""
