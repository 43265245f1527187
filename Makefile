# Every target makes .venv with what it needs; a second run installs nothing.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --disable-pip-version-check --quiet -c constraints-dev.txt
INPUTS := pyproject.toml constraints-dev.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-long fuzz check bench bench-full bench-remote bench-remote-full docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-demo  ## train, be killed, resume, compare bit by bit
	$(PY) examples/demo.py

# By the alphabet, not by the number of tests in a file: the longest are not the last ones then.
PYTEST := $(PY) -m pytest --dist loadfile --no-loadscope-reorder

# Hundreds of processes that tests start import what is compiled here once, and so do those of
# pytest, which all import every test module. Empty, the variable lets the rest be compiled once too.
test: export PYTHONDONTWRITEBYTECODE :=
# Many tests wait for a disk, a clock or a child: four processes keep two cores busy, in 10 GB.
test: $(VENV)/.installed-dev  ## run the tests, in four processes
	$(PY) -m compileall -q asyncckpt tests examples benchmarks
	$(PY) -m tests.rewritten
	$(PYTEST) -n 4

test-long: $(VENV)/.installed-dev  ## run the long tests, and all others with new examples and random delays
	$(PY) -m pytest -m long -s --timeout=7200 -o faulthandler_timeout=7100
	$(PY) -m pytest -n 3 --dist loadfile --hypothesis-profile=explore -p tests.jitter

fuzz: $(VENV)/.installed-dev  ## feed mutated inputs to decoders: make fuzz COUNT=1000000 TARGETS="record node"
	$(PY) -m tests.fuzz --inputs $(or $(COUNT),100000) $(TARGETS)

check: $(VENV)/.installed-dev  ## lint, format, types, layers, rooms, docstrings
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) -m benchmarks.code layout --check
	$(PY) -m benchmarks.code docstrings --check

bench: $(VENV)/.installed-bench  ## measure on local disk, the short form: six minutes
	$(PY) -m benchmarks

bench-full: $(VENV)/.installed-bench  ## every workload with every peer: one to two hours
	$(PY) -m benchmarks --full --only W1 W2 W3 W3-odd W4-1k W4-10k W4-10k-jax W4-10k-torch W4z-1k \
	  W4z-10k training W7 W8 W9 budgets growth
	$(PY) -m benchmarks --full --only W5 W4-100k W2-large --name full-2

bench-remote: $(VENV)/.installed-bench  ## measure on simulated object stores: six minutes
	$(PY) -m benchmarks.remote

bench-remote-full: $(VENV)/.installed-bench  ## the same with 1 GiB and every peer: hours
	$(PY) -m benchmarks.remote --full --scenario save "save in the background" --name remote-save
	$(PY) -m benchmarks.remote --full --scenario restore "small budget" sweep --name remote-restore

docs: $(VENV)/.installed-docs  ## build the documentation into site/
	$(VENV)/bin/mkdocs build --strict

clean:  ## remove caches and built files; .venv and checkpoints stay
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find asyncckpt benchmarks examples tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The demo's packages are a part of the development ones: one environment serves both.
$(VENV)/.installed-demo: $(INPUTS) | $(PY)
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(PY)
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.installed-demo $@

$(VENV)/.installed-bench: $(INPUTS) | $(PY)
	$(PIP) -e '.[bench,jax,torch]'
	@touch $@

$(VENV)/.installed-docs: $(INPUTS) | $(PY)
	$(PIP) -e '.[docs]'
	@touch $@

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "asyncckpt needs Python 3.11 or newer, and '$(PYTHON)' is not; name one that is: make PYTHON=/path/to/python3.11" >&2; \
	  exit 2; }
	$(PYTHON) -m venv $(VENV)
