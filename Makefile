# Two commands for a fresh machine: `make demo` runs the main job, `make test` runs what guards it.
# PYTHON is any Python from 3.11; TORCH is what pip is asked for first, so that the package then takes that build.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --progress-bar off --root-user-action=ignore

.PHONY: demo test clean

demo: $(VENV)/.package
	$(BIN)/nextn demo

test: export OMP_NUM_THREADS = 1
test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

clean:
	rm -rf $(VENV)

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("error: Python %d.%d is too old for nextn.\n       Name a newer one: make PYTHON=python3.12" % v[:2])'
	@echo "Setting up $(VENV); the first time takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	$(PIP) -e '.[dev]'
	@touch $@
