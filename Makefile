# Two commands on a bare machine: `make serve` and `make test`. Both set up .venv by themselves.
#   make serve ARGS="--port 9000"      further options of `tokenspeed serve`
#   make PYTHON=python3.12 ...         another Python than python3
#   make TORCH=cpu|cuda|ADDRESS ...    which torch to install (default: looks for a GPU)

PYTHON ?= python3
TORCH ?=
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
MODEL ?= demo
ARGS ?=
PYTEST_ARGS ?=
export TORCH TORCH_CPU_INDEX

SETUP = $(PYTHON) tools/setup_venv.py
BIN = .venv/bin

.PHONY: help serve test test-compile test-long test-gpu references lint format docs wheel clean

help:
	@sed -n '1,4p' Makefile; grep -E '^[a-z-]+:' Makefile | cut -d: -f1 | tr '\n' ' '; echo

serve:
	@$(SETUP)
	$(BIN)/tokenspeed serve $(MODEL) --spec eagle4 $(ARGS)

test: lint
	$(BIN)/python -m pytest -m "not gpu and not long and not compile" $(PYTEST_ARGS)

test-compile:
	@$(SETUP) --extra test
	$(BIN)/python -m pytest -m "compile and not gpu and not long" $(PYTEST_ARGS)

test-long:
	@$(SETUP) --extra test
	$(BIN)/python -m pytest --long -m "long and not gpu" $(PYTEST_ARGS)

test-gpu:
	@$(SETUP) --extra test
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

references:
	@$(SETUP) --extra test
	PYTHONPATH=.:tests:tests/engine OMP_NUM_THREADS=1 $(BIN)/python tests/engine/make_references.py

lint:
	@$(SETUP) --extra test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format:
	@$(SETUP) --extra test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs:
	@$(SETUP) --extra test
	$(BIN)/python tools/gen_options.py

wheel:
	@$(SETUP) --extra test
	$(BIN)/python wheels/build.py

clean:
	rm -rf .venv build dist wheels/dist wheels/index *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
