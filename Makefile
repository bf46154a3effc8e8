# Everything runs in .venv, which is made on first use and made again when pyproject.toml or
# constraints.txt change. PYTHON chooses the interpreter it is made from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := dev,vision,timm
PYTEST_ARGS ?=

.PHONY: help demo test lint types pytest venv clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train the small default network on the embedded digits, cut it, compare"
	@echo "make test   lint, format, types and tests"
	@echo "make lint   lint and format only"
	@echo "make clean  remove the environment, caches and build outputs"

venv: $(STAMP)

# A half-made environment has no stamp and is made again from nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "softprune needs Python 3.11 or newer; set PYTHON=/path/to/python"; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m softprune train

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy src

pytest: $(STAMP)
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

test: lint types pytest

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name '*.egg-info' -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +
