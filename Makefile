# Two commands do everything, set-up included:  make bench   make test
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup bench test test-all lint format clean

setup: $(STAMP)

# constraints.txt pins torch to the release whose plain wheel is a CPU build on a machine without a GPU.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

bench: setup
	$(BIN)/specbench run $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow" $(ARGS)

test-all: lint
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
