"""vLLM's own API tests, run against vLLM directly and through gateways: `python -m bench.vllm.suite`.

install.py    fetches vLLM's tests and pytest, and makes the models that the tests name
models.py     makes these models, tiny and random; it runs in vLLM's Python
names.py      which names they have
selection.py  which files of vLLM's tests run, and which differences are decisions of ours
plugin.py     pytest loads it: it puts gateways in front of each server that a test starts; it runs in vLLM's Python
gateways.py   the gateways in front of one server, as a process
compare.py    from the results of both runs to the list of differences
"""
