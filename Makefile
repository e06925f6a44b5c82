# Two commands for a fresh machine: `make demo` runs the main job, `make test` runs what guards it.
# PYTHON is any Python from 3.11; TORCH is what pip is asked for first, so that the package then takes that build.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --progress-bar off --root-user-action=ignore

.PHONY: demo test test-engines clean

demo: $(VENV)/.package
	$(BIN)/nextn demo

test: export OMP_NUM_THREADS = 1
test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

# SGLang's own head classes on a CPU: the engine without its compiled parts, in an environment of its own. What
# stands in for the packages left out is listed in src/nextn/verify/workers and by `nextn verify`.
ENGINES := .venv-engines

test-engines: export OMP_NUM_THREADS = 1
test-engines: $(VENV)/.dev $(ENGINES)/.sglang
	$(BIN)/python -m pytest -m engines tests/engines

$(ENGINES)/.sglang: tests/engines/requirements.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/$(PIP:$(VENV)/%=%) $(TORCH)
	$(ENGINES)/$(PIP:$(VENV)/%=%) --no-deps sglang==0.5.23
	$(ENGINES)/$(PIP:$(VENV)/%=%) -r tests/engines/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(ENGINES)

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
