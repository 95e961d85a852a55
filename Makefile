# `make help` lists the commands of every day; CONTRIBUTING.md has all others.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed$(if $(LOCKED),-locked)
# Versions with hashes: of all that CI installs, and of all that the image has. `LOCKED=1 make install` takes the first.
LOCK_OF_CI := .ci/requirements.txt
LOCK_OF_IMAGE := deploy/docker/requirements.txt
OLDEST_REDIS := .venv/.oldest-redis
PIP_INSTALL := $(BIN)/pip install -qq --disable-pip-version-check
INSTALL = $(if $(LOCKED),$(PIP_INSTALL) --require-hashes --requirement $(LOCK_OF_CI) && \
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .,$(PIP_INSTALL) --editable '.[dev]')
# One line for each package, so that a diff shows which ones changed.
LOCK = $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --upgrade
ONE_LINE_EACH := sed -z 's/ \\\n */ /g'
WORKERS ?= auto
SLOWEST := --durations=10 --durations-min=1
# If ARGS has a path, it selects a few tests. One process runs them in seconds.
SELECTED = $(if $(findstring tests/,$(ARGS)),,--numprocesses $(WORKERS) $(SLOWEST)) $(ARGS)
# Some environments forbid Python to store compiled modules. The tests start hundreds of processes, and each would
# compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
COMPOSE_FILES := $(wildcard docker-compose*.yml deploy/docker-compose*.yml)

QUICK := bench/results/quick
ROUTERS := sglang-router,vllm-router

MEASURED := bench-overhead bench-overhead-latency bench-routing bench-routing-mixes bench-routing-real bench-place \
	bench-fleet-grid bench-store

define HELP
make up           a cluster on this machine, on http://127.0.0.1:8080, until Ctrl-C
make test         the tests, with real Redis and real processes; ARGS=tests/api runs only these
make check        lint, format, types, length of functions, compose files: they must be clean before a commit
make install      what these need, into .venv
make bench-quick  compares routing and cost with other routers, in eight minutes; makes a page with plots
make lock         writes the newest versions that pyproject.toml allows, with their hashes, for CI and for the image
CONTRIBUTING.md has all others: tests with more programs, on real vLLM, of client libraries; benches.
endef
export HELP

.PHONY: help install up test test-programs test-slow test-vllm test-vllm-suite test-lmcache test-clients test-fit compose-test lock bench bench-quick bench-faults check $(MEASURED)
.DEFAULT_GOAL := install

help:
	@echo "$$HELP"

install: $(INSTALLED)

lock: install
	@$(PIP_INSTALL) uv
	@echo 'setuptools>=77' | $(LOCK) --extra picker pyproject.toml - >.venv/lock-of-image
	@echo 'setuptools>=77' | $(LOCK) --extra dev --extra oldest-redis pyproject.toml - >.venv/lock-of-ci
	@$(ONE_LINE_EACH) .venv/lock-of-image >$(LOCK_OF_IMAGE)
	@$(ONE_LINE_EACH) .venv/lock-of-ci >$(LOCK_OF_CI)
	@wc -l $(LOCK_OF_IMAGE) $(LOCK_OF_CI)

# The stamp is younger than pyproject.toml exactly when all packages of pyproject.toml are installed.
$(INSTALLED): pyproject.toml $(if $(LOCKED),$(LOCK_OF_CI))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "KVGate needs Python 3.11 or newer; name one with: make install PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv || \
		{ echo "cannot create .venv; on Debian: apt install python3-venv" >&2; exit 1; }
	@echo "installing into .venv (about a minute, once)"
	@$(INSTALL) || \
		{ echo "KVGate was not installed: pip says why, above. Most often the package index cannot be reached (network," \
			"proxy, PIP_INDEX_URL). Then run make again." >&2; exit 1; }
	@touch $@

$(OLDEST_REDIS): $(INSTALLED)
	@$(PIP_INSTALL) --editable '.[oldest-redis]'
	@touch $@

up: install
	@$(BIN)/kvgate up $(ARGS)

test: install
	$(BIN)/pytest $(SELECTED)

test-programs: install $(OLDEST_REDIS)
	@$(BIN)/python -m tests.deploy.helm
	$(BIN)/pytest -m '(older_redis or needs) and not slow and not vllm and not lmcache' $(SELECTED)

test-slow: install $(OLDEST_REDIS)
	$(BIN)/pytest -m 'slow or older_redis' $(SELECTED)
	$(BIN)/pytest --hypothesis-profile others -m hypothesis $(SELECTED)

# -s: these tests take minutes and print their progress. A path in ARGS selects a few of them.
test-vllm: install
	@$(BIN)/python -m bench.vllm.install
	$(BIN)/pytest $(if $(findstring tests/,$(ARGS)),,tests/vllm) -m vllm -s $(ARGS)

test-vllm-suite: install
	@$(BIN)/python -m bench.vllm.suite $(ARGS)

test-lmcache: install
	@$(BIN)/python -m bench.vllm.lmcache
	$(BIN)/pytest tests/lmcache -m lmcache -s $(ARGS)

test-clients: install
	@$(BIN)/python -m tests.clients.install
	$(BIN)/pytest tests/clients -m clients $(ARGS)

test-fit: install
	@$(BIN)/python -m tests.fit.install
	$(BIN)/pytest tests/fit -m fit $(ARGS)

# -s: Docker prints its progress.
compose-test: install
	$(BIN)/pytest tests/compose -m compose -s $(ARGS)

bench-quick: install
	@echo "1 of 3: what a request costs (2 to 3 minutes, and a minute more the first time, to install the other routers)"
	@$(BIN)/python -m bench.overhead --install --quick --contenders direct,nginx,kvgate,$(ROUTERS) --rounds 1 --seconds 2 --warm-up-s 0.5 \
		--out $(QUICK)/overhead.json
	@echo "2 of 3: where requests go (4 to 5 minutes)"
	@$(BIN)/python -m bench.routing --mixes images,chat --gateways 1,4 --seeds 11 --out $(QUICK)/routing.json \
		--systems pinned,round_robin,least_loaded,consistent_hash,prefix_kv_aware,$(ROUTERS)
	@echo "3 of 3: what a placement costs (seconds)"
	@$(BIN)/python -m bench.place --rounds 5 --out $(QUICK)/place.json
	@$(BIN)/python -m bench.report --results $(QUICK) --out $(QUICK)/report.html

# A benchmark that fails is named. The others are still measured and shown.
bench: install
	@$(MAKE) --keep-going --no-print-directory $(MEASURED); measured=$$?; $(BIN)/python -m bench.report; exit $$measured

bench-overhead:
	$(BIN)/python -m bench.overhead --install --out bench/results/overhead.json

bench-overhead-latency:
	$(BIN)/python -m bench.overhead --contenders direct,nginx,kvgate,sglang-router,vllm-router --prompts '350 B' \
		--answers 'plain,stream 16' --connections '' --rates 200,1000,1500 --out bench/results/overhead-latency.json

bench-place bench-store: bench-%:
	$(BIN)/python -m bench.$* --out bench/results/$*.json

bench-fleet-grid:
	$(BIN)/python -m bench.fleet --grid --gateways 1,4,12 --workers 8,64,240,500,1000 --sessions-per-s 40 --seconds 8 \
		--out bench/results/fleet-grid.json
	$(BIN)/python -m bench.report.growth

bench-routing:
	$(BIN)/python -m bench.routing --mixes images,vqa,chat --out bench/results/routing.json

bench-routing-mixes:
	$(BIN)/python -m bench.routing --mixes contexts,rag,hostile,hot,tail-1.5,tail-3 --out bench/results/routing-mixes.json

bench-routing-real:
	$(BIN)/python -m bench.routing --real --out bench/results/routing-real.json

# Runs all faults, even if a goal is missed.
bench-faults: install
	missed=0; for options in '' '--gateways 8' '--replicas 64' '--waiting'; do \
		$(BIN)/python -m bench.faults $$options || missed=1; \
	done; exit $$missed

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/function_length.py
	@if ! docker compose version >/dev/null 2>&1; then \
		echo "*** SKIPPED: no docker compose here, so no compose file was checked ***"; \
	else \
		for file in $(COMPOSE_FILES); do \
			for profiles in '' '--profile=*'; do \
				echo "docker compose -f $$file $$profiles config -q"; \
				docker compose -f $$file $$profiles config -q || exit 1; \
			done; \
		done; \
	fi
