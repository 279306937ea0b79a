# One command sets up and runs the demonstration, one the tests. Both need only python3 >= 3.10 with venv, and pip;
# tests of stand-alone projects also a C++ compiler, and are skipped without one.
PYTHON ?= python3
VENV ?= .venv
# Installed only where torch cannot be imported from VENV; TORCH='torch==2.13.0 --index-url ...' picks another build.
TORCH ?= torch==2.13.0
CUDA ?= cu13
JOBS ?= 2
BIN := $(VENV)/bin

.PHONY: demo test lint setup clean

demo: setup
	$(BIN)/cutlass-sep demo

test: setup lint
	$(BIN)/python -m pytest -n $(JOBS) tests

lint: setup
	$(BIN)/ruff check cutlass_sep tests benchmarks

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[$(CUDA),test]'
	touch $@

clean:
	rm -rf $(VENV) build dist
