"""`kvgate doctor`: what is wrong with a running cluster, and what to do about it.

gather           collects the evidence from Redis, gateways, replicas and LMCache, and changes nothing
ask              the questions to one replica, gateway or LMCache server
event_endpoints  which endpoints of KV events answer over the network
evidence         the records of what was collected
checks/          pure functions from evidence to findings, in one file for each subject; those on Redis are in
                 coordinator/redis/checks.py, because the watch shares them
examine          runs all checks
page             docs/doctor.md, made from the kinds of findings
"""
