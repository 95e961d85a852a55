# make up     a cluster on this machine, on http://127.0.0.1:8080, until Ctrl-C
# make test   the tests, with real Redis and real processes
# make test-vllm  the tests on real vLLM, on CPUs; installs it in the user's cache folder first (3.5 GB, once)
# make bench-quick  in ten minutes, how KVGate routes and what it costs beside others: a page with plots
# make bench  all of it, in hours; real vLLM included
# make check  what must be clean before a commit: lint, format, types, sizes, compose file

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
COMPOSE_FILES := $(wildcard docker-compose*.yml deploy/docker-compose*.yml)

QUICK := bench/results/quick
ROUTERS := sglang-router,vllm-router

MEASURED := bench-overhead bench-overhead-latency bench-routing bench-routing-mixes bench-routing-real bench-place bench-store

.PHONY: install up test test-vllm bench bench-quick check $(MEASURED)
.DEFAULT_GOAL := install

install: $(INSTALLED)

# The stamp is younger than pyproject.toml exactly when what that asks for is installed.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "KVGate needs Python 3.11 or newer; name one with: make install PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv || \
		{ echo "cannot create .venv; on Debian: apt install python3-venv" >&2; exit 1; }
	@echo "installing into .venv (about a minute, once)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(INSTALLED)

up: install
	@$(BIN)/kvgate up

test: install
	$(BIN)/pytest $(ARGS)

# -s: they take minutes, and say how far they are.
test-vllm: install
	@$(BIN)/python -m bench.vllm.install
	$(BIN)/pytest tests/vllm -m vllm -s $(ARGS)

bench-quick: install
	@$(BIN)/python -m bench.overhead --install --quick --contenders direct,nginx,kvgate,$(ROUTERS) --rounds 1 --seconds 2 --warm-up-s 0.5 \
		--out $(QUICK)/overhead.json
	@$(BIN)/python -m bench.routing --mixes images,chat --gateways 1,4 --seeds 11 --out $(QUICK)/routing.json \
		--systems pinned,round_robin,least_loaded,consistent_hash,prefix_kv_aware,$(ROUTERS)
	@$(BIN)/python -m bench.place --calls 100 --out $(QUICK)/place.json
	@$(BIN)/python -m bench.report --results $(QUICK) --out $(QUICK)/report.html

# What fails is named, and does not keep the others from being measured and shown.
bench: install
	@$(MAKE) --keep-going --no-print-directory $(MEASURED); measured=$$?; $(BIN)/python -m bench.report; exit $$measured

bench-overhead:
	$(BIN)/python -m bench.overhead --install --out bench/results/overhead.json

bench-overhead-latency:
	$(BIN)/python -m bench.overhead --contenders direct,nginx,kvgate,sglang-router,vllm-router --prompts '350 B' \
		--answers 'plain,stream 16' --connections '' --rates 200,1500 --out bench/results/overhead-latency.json

bench-place bench-store: bench-%:
	$(BIN)/python -m bench.$* --out bench/results/$*.json

bench-routing:
	$(BIN)/python -m bench.routing --mixes images,vqa,chat --out bench/results/routing.json

bench-routing-mixes:
	$(BIN)/python -m bench.routing --mixes contexts,rag,hostile,hot,tail-1.5,tail-3 --out bench/results/routing-mixes.json

bench-routing-real:
	$(BIN)/python -m bench.routing --real --out bench/results/routing-real.json

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/size_limits.py
	@if ! docker compose version >/dev/null 2>&1; then \
		echo "*** SKIPPED: no docker compose here, so no compose file was checked ***"; \
	else \
		for file in $(COMPOSE_FILES); do \
			echo "docker compose -f $$file config -q"; docker compose -f $$file config -q || exit 1; \
		done; \
	fi
