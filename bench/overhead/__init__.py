"""The cost of a gateway: CPU per request, saturation, added latency. KVGate, its peers and a bare proxy in one run.

canned.py      the upstream: prepared answers, about 10 us a request
client.py      the load: prepared bytes on raw connections, as fast as possible or at a fixed rate
contenders.py  starts each proxy, and names the processes whose cost is counted
shapes.py      the grid: prompts, answers, connections
placements.py  how long gateways and pickers take to choose a replica
cell.py        one measurement
__main__.py    the run, its table and its JSON
"""
