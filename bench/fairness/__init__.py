"""What tenants get of replicas that have less room than they are asked for. `python -m bench.fairness`

shares      each tenant gets the share of its weight, whatever the others send and through which gateways
priorities  requests of the first band hardly wait, and the last band goes on
limits      concurrency and tokens_per_min hold over all gateways, and a killed gateway's part is free again
budget      what a tenant with tokens_per_min may have used by any moment
cost        what the queue takes of throughput and of the cache

tenants     the tenants of a run, and the gateways' configuration for them
load        their clients: at a rate, or one request after the other
capacity    what replicas can do, and the rates that are so many times as much
fleet       replicas that run a few requests at once, and clusters of them
watch       looks at replicas and Redis while a run goes on
row         a measurement with its goals
"""
