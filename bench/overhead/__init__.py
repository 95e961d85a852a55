"""What a gateway costs: CPU per request, saturation, added latency; KVGate, its peers and a bare proxy, in one run.

canned.py    the upstream: an answer prepared beforehand, about 10 us a request
client.py    the load: prepared bytes on raw connections, as fast as they go or at a fixed rate
contenders.py  how each proxy is started, and which processes its cost is counted on
shapes.py    the grid: prompts, answers, connections
cell.py      one measurement
__main__.py  the run, its table and its JSON
"""
