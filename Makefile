# Every target makes what it needs in .venv: nothing else has to be typed on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO_READY := .venv/.ready-demo
# Modules are compiled when they are first imported, and kept: most of what is installed never is.
export PYTHONDONTWRITEBYTECODE =
INSTALL := $(BIN)/pip install --no-compile --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable
DEMO_OUT ?= demo-out
SOAK_SEED ?= 0
SOAK_RUNS ?= 200

.DEFAULT_GOAL := help
.PHONY: help setup demo quick test together waiting soak lint audit proofs conformance bench mutants docs reach release clean

help: ## What can be made
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

setup: $(READY) ## The virtual environment, with every extra the tests need

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "odb-ref needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -m venv .venv || { echo "no venv module: on Debian, apt-get install python3-venv" >&2; exit 2; }

$(READY): pyproject.toml .ci/constraints.txt | .venv/bin/python
	$(INSTALL) '.[torch,sim,verify,accelerate,transformers,lightning,tensorboard,data,dask,ray,bench,docs,dev]'
	@touch $(DEMO_READY) $@

$(DEMO_READY): pyproject.toml .ci/constraints.txt | .venv/bin/python
	$(INSTALL) '.[torch,sim]'
	@touch $@

demo: $(DEMO_READY) ## Simulate a real trace, train two ranks on real text, check both, write demo-out/report.html
	$(BIN)/odb-ref demo --out $(DEMO_OUT)

# As many processes as cores run already.
quick together waiting test: export OMP_NUM_THREADS = 1
quick: $(READY) ## The fast loop: the tests of core, spec and repository, and some batches, in under a minute
	$(BIN)/pytest -n logical --maxprocesses 8 --dist worksteal --slice -m "not slow" tests/core tests/spec tests/repo tests/torch/test_batch_digests.py

test: $(READY) ## The tests, of slow ones a slice: those that wait beside those that compute, then the others one by one
	$(MAKE) -j2 --no-print-directory together waiting; both=$$?; cat .make/waiting.txt; \
	  $(BIN)/pytest --slice --part alone --durations 15 && exit $$both

# What waits for limits of seconds comes first on a core.
together: $(READY)
	nice -n 5 $(BIN)/pytest --slice --part together -n logical --maxprocesses 8 --dist worksteal --durations 15

waiting: $(READY)
	@mkdir -p .make
	@$(BIN)/pytest --slice --part waiting -n 3 --dist worksteal --durations 15 >.make/waiting.txt 2>&1

soak: $(READY) proofs ## What is long: swarm, faults, hostile traces, defects, proof mutants, tuning (SOAK_SEED=0 SOAK_RUNS=200)
	$(BIN)/pytest --sliced -n logical --maxprocesses 8 --dist worksteal
	$(BIN)/python -m tests.soak.swarm --seed $(SOAK_SEED) --runs $(SOAK_RUNS)
	$(BIN)/python -m tests.soak.faults --seed $(SOAK_SEED) --runs $(SOAK_RUNS)
	$(BIN)/python -m tests.soak.fuzz_check --seed $(SOAK_SEED) --runs 1000000
	$(BIN)/python -m tests.mutants.deep
	$(BIN)/python -m tests.mutants.fresh
	$(BIN)/python -m tests.mutants.planted
	$(MAKE) -C proofs whole
	$(BIN)/python -m tests.proofs.mutants
	$(BIN)/python -m tests.simulator_answers.brute

lint: $(READY) ## Format, lint, types and phrases
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.repo.prose

audit: ## Have coqchk judge the proofs that are built, all of them (two minutes)
	proofs/audit.py --here --whole

proofs: ## Check the Coq development, audit it and build its executable model (installs Coq where apt-get and root are at hand)
	.ci/install-coq.sh
	$(MAKE) -C proofs
	$(MAKE) -C proofs extraction

conformance: $(READY) ## Ask the planners of other projects (installed below build/peers), and write docs/explanation/scoreboard.md
	$(BIN)/python -m tests.conformance.scoreboard
	PYTHONPATH=build/peers/verl-0.9.1 $(BIN)/pytest tests/compat/test_planners.py

bench: $(READY) ## Speed and memory, beside the released peer; figures of the README
	$(BIN)/python -m tests.bench

mutants: $(READY) ## Mutation test of odb_ref/core and odb_ref/trace with mutmut, and its score by module (half an hour)
	$(BIN)/mutmut run --max-children 2
	$(BIN)/python -m tests.mutants.score

reach: $(READY) ## Tests in the oldest, newest and pinned versions of what is claimed: downloads 25 GB (REACH="oldest newest" for some)
	$(BIN)/python -m tests.reach $(REACH)

docs: $(READY) ## The documents as a site, docs/_build/html; a warning or a dead link is an error
	$(BIN)/python docs/picture.py
	$(BIN)/python spec/traceability.py
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

release: $(READY) ## Wheel and sdist in dist, checked, and tested from an empty folder (RELEASE=--draft before its entry has a date)
	$(PYTHON) -m venv .make/release
	.make/release/bin/pip install --quiet --disable-pip-version-check build twine check-wheel-contents
	rm -rf dist
	.make/release/bin/python -m build
	.make/release/bin/twine check --strict dist/*
	.make/release/bin/check-wheel-contents --ignore W009 dist/*.whl
	$(BIN)/python -m tests.release $(RELEASE) dist

clean: ## Remove what was made
	rm -rf .venv .make $(DEMO_OUT) docs/_build docs/generated .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	$(MAKE) -C proofs clean
