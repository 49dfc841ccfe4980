# Every target makes what it needs in .venv: nothing else has to be typed on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO_OUT ?= demo-out

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint proofs bench mutants clean

help: ## What can be made
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

setup: $(READY) ## The virtual environment, with every extra the tests need

$(READY): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "odb-ref needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -m venv .venv || { echo "no venv module: on Debian, apt-get install python3-venv" >&2; exit 2; }
	@# Compiled by all cores at once, not by pip on one: that is a minute.
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[torch,accelerate,transformers,lightning,tensorboard,plots,dask,ray,bench,dev]'
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@

demo: $(READY) ## Simulate a real trace, train two ranks on real text, check both, write demo-out/report.html
	$(BIN)/odb-ref demo --out $(DEMO_OUT)

test: $(READY) ## All tests: those that can on all cores, the others one by one
	$(BIN)/pytest --part together -n logical --maxprocesses 8 --dist worksteal; together=$$?; \
	  $(BIN)/pytest --part alone && exit $$together

lint: $(READY) ## Format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

proofs: ## Check the Coq development and audit it (installs Coq where apt-get and root are at hand)
	.ci/install-coq.sh
	$(MAKE) -C proofs

bench: $(READY) ## Speed and memory, beside the released peer; figures of the README
	$(BIN)/python -m tests.bench

mutants: $(READY) ## Mutation test of odb_ref/core with mutmut, and its score by module (half an hour)
	$(BIN)/mutmut run --max-children 2
	$(BIN)/python -m tests.mutants.score

clean: ## Remove what was made
	rm -rf .venv $(DEMO_OUT) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	$(MAKE) -C proofs clean
