# Two commands do everything, set-up included:  make bench   make test
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup browser bench gpu test test-all lint format clean

setup: $(STAMP)

# constraints.txt pins torch to the release whose plain wheel is a CPU build on a machine without a GPU.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

# The page of the HTML report is tested in Debian's Chromium. Where it is missing and may be installed, it is; where
# it cannot be had, those tests skip and say so.
browser: setup
	@if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } \
	    >$(VENV)/chromium.log 2>&1 || echo "no Chromium could be installed: see $(VENV)/chromium.log"; fi

bench: setup
	$(BIN)/specbench run $(ARGS)

# All that a GPU must show, in under nine minutes: needs no set-up and no network, only a Python with torch.
gpu:
	PYTHON=$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) scripts/gpu.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint browser
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow" $(ARGS)

test-all: lint browser
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
