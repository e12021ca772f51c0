# make demo | test | lint | bench | gain | clean      each works on a fresh clone: the environment is made on demand
#   make demo ARGS="--quick"        make gain SEEDS="11 12 13"        PYTHON=python3.12 make test

PYTHON ?= python3
SEEDS  ?= 1 2 3
ARGS   ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.stamp

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench gain clean

# The root folders `data`, `eval`, ... must not be importable by their bare names from the clone's root.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Waiting threads that spin slow down whoever shares the cores.
demo test bench gain: export OMP_WAIT_POLICY := PASSIVE
# At these model sizes a second thread gains nothing; a second process does. (bench chooses its own.)
demo test gain: export OMP_NUM_THREADS := 1
# glibc maps and faults in every large temporary anew by default: 1.5-2x slower training. Read at process start only.
demo test bench gain: export MALLOC_MMAP_THRESHOLD_ := 1073741824
demo test bench gain: export MALLOC_TRIM_THRESHOLD_ := 17179869184
demo test bench gain: export MALLOC_TOP_PAD_ := 536870912

help:
	@sed -n '1,2s/^# *//p' Makefile

demo: $(STAMP)
	@$(BIN)/jointrag demo $(ARGS)

test: lint
	@$(BIN)/python -m pytest -q -n 2 $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary

bench: $(STAMP)
	@$(BIN)/python benchmarks/run.py $(ARGS)

gain: $(STAMP)
	@$(BIN)/python -m jointrag.lab.gain --seeds "$(SEEDS)" $(ARGS)

# Removes environment, builds and caches; runs/ is yours and stays.
clean:
	@rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage .coverage.* htmlcov
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a minute or two) ..." >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "got Python %d.%d, expected 3.11 or newer: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -c constraints.txt setuptools
	@$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $(STAMP)
