# Two commands from a fresh clone: `make train` and `make test`. ARGS reaches train.py: make train ARGS="--seed 1".
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Pinned: the release that is tested, for which CPU and CUDA builds exist. An installed torch is kept as it is.
TORCH ?= torch==2.13.0
ARGS ?=

.PHONY: setup train test bench bench-baselines lint clean

setup: $(VENV)/.installed

$(VENV)/.installed: setup.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.10 or newer"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[test]"
	touch $@

train: setup
	$(BIN)/python train.py --beta 0.2 $(ARGS)

test: setup
	$(BIN)/python -m ruff check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile tests

# CPU: under three minutes. ARGS="--budget 900" for more rounds, ARGS="--device cuda" on a GPU.
bench: setup
	$(BIN)/python kernels/bench $(ARGS)

# TRL and Liger, which the benchmarks then show as rows.
bench-baselines: setup
	$(BIN)/python -m pip install --quiet -e ".[bench]"

lint: setup
	$(BIN)/python -m ruff check .

clean:
	rm -rf $(VENV) build *.egg-info
