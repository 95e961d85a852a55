"""What tenants get of replicas that have less room than they are asked for. `python -m bench.fairness`

shares      each tenant gets the share of its weight, whatever the others send and through which gateways
priorities  requests of the first band hardly wait, and the last band goes on

tenants     the tenants of a run, and the gateways' configuration for them
load        their clients: at a rate, or one request after the other
capacity    what replicas can do, and the rates that are so many times as much
fleet       replicas that run a few requests at once, and clusters of them
watch       looks at Redis while a run goes on
row         a measurement with its goals
"""
