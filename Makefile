# One word per lane; `make help` lists them. Works with GNU make 3.81 (macOS) and later.
#
#   ARGS         passed on to the lane's command:  make compare ARGS="--seeds 3"
#   PYTHON       the Python to build .venv on:     make setup PYTHON=python3.12
#   TORCH_INDEX  where to take torch from; by default pip's own configuration decides (see the README)
SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup compare study test test-triton lint format types bench docs clean distclean

ARGS ?=
PYTHON ?=
TORCH_INDEX ?=
# Test processes. Each holds its own torch, and distributed tests start ranks of their own.
WORKERS ?= auto --maxprocesses=4
export PYTHON TORCH_INDEX

RUN := .venv/bin/python

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup:  ## make .venv with the pinned packages, or complete it; every lane below does this first
	@bash scripts/setup_venv.sh

compare: setup  ## train the same model with AdamW, Muon and Periodic Row-wise Muon, and show who wins
	@.venv/bin/rowdit compare $(ARGS)

study: setup  ## the study behind docs/evidence.md; hours, can be stopped and goes on when called again
	@OMP_NUM_THREADS=1 .venv/bin/rowdit study small $(ARGS)

test: setup  ## all tests but the slow and the GPU ones; lint and types are among them
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --durations=15 $(ARGS)

# In a folder of its own, not in .venv: with Triton there, torch.compile and others would take it up.
test-triton: setup  ## the kernels of ns_kernels="triton" in Triton's interpreter, on a CPU (Linux; 700 MB, once)
	@test -d .triton || .venv/bin/pip install -q --no-deps -c constraints.txt --target .triton triton
	@OMP_NUM_THREADS=1 PYTHONPATH=.triton TRITON_INTERPRET=1 \
		$(RUN) -m pytest tests/unit/rowmuon/test_symmetric_kernel.py $(ARGS)

lint: setup  ## ruff: rules and format
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check .

format: setup  ## let ruff mend what it can
	@$(RUN) -m ruff check --fix . && $(RUN) -m ruff format .

types: setup  ## mypy over src/
	@$(RUN) -m mypy

bench: setup  ## time the optimizer step against its peers
	@.venv/bin/rowdit bench $(ARGS)

docs: setup  ## check the documents: links, and that every example in them runs
	@$(RUN) -m pytest tests/contract/test_documents.py tests/contract/test_doctests.py $(ARGS)

clean:  ## remove caches and build products
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	rm -rf .venv .venv.lock .triton
