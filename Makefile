# Everything runs in .venv, which is made on first use and made again when pyproject.toml or
# constraints.txt change. PYTHON chooses the interpreter it is made from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.installed-run
TEST := $(VENV)/.installed-test
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt
EXTRAS := dev,lab,docs,vision,timm,onnx,lightning,accelerate
PYTEST_ARGS ?=
PYVERSION = $(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
FUZZ_ARGS ?=
KILL_ARGS ?=
# Tests start many processes, which would otherwise compile torch's files each time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test quick lint types pytest slow-list property fuzz kill zoo packages docs wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train, prune and cut a small network on the bundled digits; writes a report"
	@echo "make test      lint, format, types and tests"
	@echo "make quick     lint, types and the quick tests"
	@echo "make slow-list measure all tests on one core; rewrites tests/slow.txt (half an hour)"
	@echo "make lint      lint and format only"
	@echo "make property  1,000 random networks: cuts exact, targets met or refused; resumes where it was stopped"
	@echo "make fuzz      10,000 damaged files of every format: read, or refused with a message (hours)"
	@echo "make kill      200 kills of training, save, export and report: the same bits afterwards"
	@echo "make zoo       every torchvision CNN and timm family: channels cut at random, verified exact (an hour)"
	@echo "make packages  80 networks of pytorchcv, MONAI, ultralytics and others: exact, refused or failed (half an hour)"
	@echo "make docs      the documentation site in build/site; broken links fail"
	@echo "make wheel     dist/softprune-VERSION-py3-none-any.whl"
	@echo "make clean     remove the environment, caches and build outputs"

# An incomplete environment has no stamp and is made again. For the demo the package is used from its source, which
# saves the isolated build of an editable install. pip compiles nothing: Python compiles what it imports.
$(RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "softprune needs Python 3.11 or newer; set PYTHON=/path/to/python"; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["dependencies"], *project["optional-dependencies"]["lab"], sep="\n")' > $(VENV)/requirements.txt
	$(PIP_INSTALL) -r $(VENV)/requirements.txt
	@$(BIN)/python -c 'import pathlib, sysconfig; folder = pathlib.Path(sysconfig.get_path("purelib")); \
		(folder / "softprune-source.pth").write_text(str(pathlib.Path("src").resolve()))'
	@touch $@

$(TEST): $(RUN)
	$(PIP_INSTALL) -e ".[$(EXTRAS)]"
	@touch $@

demo: $(RUN)
	$(BIN)/python -m softprune train

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST)
	$(BIN)/mypy src

pytest: $(TEST)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

# mypy uses one core: it runs beside the tests.
test: lint
	$(MAKE) -j 2 types pytest

quick: lint
	$(MAKE) -j 2 types pytest PYTEST_ARGS='-m "not slow" $(PYTEST_ARGS)'

slow-list: $(TEST)
	rm -f .cpu-times
	-$(BIN)/python -m pytest --cpu-times .cpu-times
	$(BIN)/python tests/support/slow_tests.py .cpu-times

property: $(TEST)
	$(BIN)/python benchmarks/property.py

fuzz: $(TEST)
	$(BIN)/python benchmarks/fuzz.py $(FUZZ_ARGS)

kill: $(TEST)
	$(BIN)/python benchmarks/kill.py $(KILL_ARGS)

zoo: $(TEST)
	$(BIN)/python benchmarks/zoo.py
	$(BIN)/python benchmarks/render.py

# The packages live beside the environment of the tests, whose versions they must not change.
packages: $(TEST)
	$(PYTHON) -m venv build/packages
	build/packages/bin/python -m pip install -q --no-deps --only-binary :all: -r benchmarks/packages.txt
	cd benchmarks && PYTHONPATH=../src:.:$(abspath $(VENV))/lib/python$(PYVERSION)/site-packages \
		../build/packages/bin/python packages.py
	$(BIN)/python benchmarks/render.py

docs: $(TEST)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q
	@echo "build/site/index.html"

wheel: $(RUN)
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name '*.egg-info' -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +
