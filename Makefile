# make bench   the main job: the most this machine allows
# make test    lint, types, tests, examples, kernels checked and compiled
#
# Each takes a fixed time, however many ops there are: what it draws is another part of all cases
# for each commit (src/tilewright/lab/budget.py). It prints the key of its draw:
#   make test DRAW="--draw 0123456789ab"
# TORCH and PYTHON can be set: make test TORCH=torch==2.11.0 PYTHON=python3.12

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
OUT ?= out
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# NumPy 2.4 breaks the interpreter of Triton 3.6; set by `make oldest`.
EXTRA ?=
DRAW ?=
# Another budget for `verify` than the declared one; set by .ci/run.
VERIFY ?=
# The oldest SM, the one we run on and the newest.
MATRIX := --arch 75 --arch 90 --arch 120 --ledger results/compile $(DRAW)

# Hundreds of short processes import the package: without bytecode each would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench test setup lint types tests examples matrix verify oldest clean
.DEFAULT_GOAL := bench

bench: setup
	$(BIN)/tilewright doctor
	$(BIN)/tilewright verify --quick $(DRAW) --json $(OUT)/verify.json
	$(BIN)/tilewright compile $(MATRIX) --json $(OUT)/compile.json
	$(BIN)/tilewright bench --no-checks $(DRAW) --out $(OUT)/bench --html $(OUT)/bench.html

test: setup lint types tests examples matrix verify

setup: $(VENV)/.done

# A CPU-only machine gets a CPU build of torch where one is at hand, else whatever pip finds.
$(VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null 2>&1 || ! $(PIP) "$(TORCH)+cpu" 2>/dev/null; then \
	  echo "installing $(TORCH)"; $(PIP) "$(TORCH)"; \
	else echo "installed $(TORCH), CPU build"; fi
	$(PIP) -e ".[dev]" $(EXTRA)
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

tests: setup
	$(BIN)/python -m pytest -n auto --dist worksteal --durations 10 $(DRAW)

examples: setup
	@set -e; for example in examples/*.py examples/flash_attention/*.py; do \
	  echo "$$example"; $(BIN)/python $$example; done

matrix: setup
	$(BIN)/tilewright compile $(MATRIX)

verify: setup
	$(BIN)/tilewright verify --device cpu --quick $(DRAW) $(VERIFY)

# The oldest Triton we support: its compiler is the one many GPU machines have.
oldest:
	$(MAKE) setup VENV=.venv-oldest EXTRA='"triton==3.6.0" "numpy<2.4"'
	.venv-oldest/bin/tilewright compile --arch 75 --arch 90 --ledger results/compile $(DRAW)
	.venv-oldest/bin/tilewright verify --device cpu --quick $(DRAW) $(VERIFY)

clean:
	rm -rf .venv .venv-oldest $(OUT)
