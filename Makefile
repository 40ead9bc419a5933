# Two commands from a fresh clone: `make train` and `make test`. ARGS reaches train.py: make train ARGS="--seed 1".
PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv/vllm
BIN := $(VENV)/bin
# Pinned: the release that is tested, for which CPU and CUDA builds exist. An installed torch is kept as it is.
TORCH ?= torch==2.13.0
ARGS ?=
# What is installed beside the base: EXTRAS=test,server runs the tests of the environment's server too.
EXTRAS ?= test

.PHONY: setup train test test-vllm test-demo bench bench-baselines lint clean

setup: $(VENV)/.installed-$(EXTRAS)

$(VENV)/.installed-$(EXTRAS): setup.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.10 or newer"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[$(EXTRAS)]"
	touch $@

train: setup
	$(BIN)/python train.py --beta 0.2 $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile tests

# The tests that run vLLM's real engine, on a CPU too, in an environment of their own. Code 77: it cannot be installed on
# this machine, for the reason printed; everything else that goes wrong is a failure.
test-vllm:
	@code=0; $(PYTHON) tests/vllm_engine/install.py "$(VENV_VLLM)" "$(TORCH)" || code=$$?; \
	if [ $$code -eq 77 ]; then exit 0; elif [ $$code -ne 0 ]; then exit $$code; fi; \
	set -x; "$(VENV_VLLM)/bin/python" -m pytest -q -m vllm tests/vllm_engine

# The demo's page in a real browser. Code 77: there is none and it cannot be installed here, for the reason printed.
test-demo: setup
	@code=0; $(BIN)/python tests/find_browser.py || code=$$?; \
	if [ $$code -eq 77 ]; then exit 0; elif [ $$code -ne 0 ]; then exit $$code; fi; \
	set -ex; $(BIN)/python -m pip install --quiet -e ".[test,demo,demo-test]"; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_demo_page.py

# CPU: under three minutes. ARGS="--budget 900" for more rounds, ARGS="--device cuda" on a GPU.
bench: setup
	$(BIN)/python kernels/bench $(ARGS)

# TRL and Liger, which the benchmarks then show as rows.
bench-baselines: setup
	$(BIN)/python -m pip install --quiet -e ".[bench]"

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) $(VENV_VLLM) build *.egg-info
