# `make demo` and `make test` need Python and make; everything else they install into .venv.
# Another interpreter: `make test PYTHON=python3.12`. Part of the tests:
# `make pytest PYTEST_ARGS="-m 'not slow' tests/recipes"`; on more processes: `make test WORKERS=8`.

PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LINK_TREE := .typing

.PHONY: help demo test lint format typecheck pytest clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small model on real documents under a memory cap, three ways"
	@echo "make test       lint, typecheck and pytest"
	@echo "make lint       ruff: rules and format"
	@echo "make format     let ruff rewrite what it can"
	@echo "make typecheck  mypy --strict"
	@echo "make pytest     the tests alone (PYTEST_ARGS=...)"
	@echo "make clean      remove the environment, caches and build products (runs/ stays)"

demo: $(INSTALLED)
	$(BIN)/rematic demo

# One after the other, cheapest first, so that the summary of the tests is the last thing printed.
test: $(INSTALLED)
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory typecheck
	$(MAKE) --no-print-directory pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy finds packages by the names of their folders, so it reads a tree of links that has them.
typecheck: $(INSTALLED)
	rm -rf $(LINK_TREE)
	mkdir -p $(LINK_TREE)/rematic
	ln -s "$(CURDIR)"/plugin/* "$(CURDIR)/callbacks" "$(CURDIR)/recipes" $(LINK_TREE)/rematic/
	MYPYPATH=$(LINK_TREE) $(BIN)/mypy --strict -p rematic

pytest: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(LINK_TREE) build dist *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find plugin callbacks recipes tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Installed once, and again when what is needed changes.
$(INSTALLED): pyproject.toml constraints.txt plugin/version.py
	@$(PYTHON) -c 'import sys; found = sys.version.split()[0]; sys.exit(sys.version_info < (3, 10) and f"rematic needs Python 3.10 or newer, $(PYTHON) is {found}: set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@
