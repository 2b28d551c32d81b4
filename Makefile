# make train: set up .venv and train; make test: lint, types and tests. Both only do what is still to do.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup setup-dev train test lint types tests slow check-accounting audit bench bench-quick results clean

help:
	@echo "make train             set up .venv and train MNIST privately; prints accuracy, epsilon and guarantee"
	@echo "make test              set up .venv with the test extras; run ruff, mypy and the quick tests"
	@echo "make slow              the slow tests"
	@echo "make check-accounting  sweep the accountant over its range against an oracle (20 minutes)"
	@echo "make audit             measure all claims: half an hour on one core; what is in results/audit.json is kept"
	@echo "make results           the tables of docs/results.md: hours; what is in results/ is kept"
	@echo "make bench             speed and memory beside others, into docs/performance.md (15 minutes, quiet machine)"
	@echo "make bench-quick       the ratio table alone; fails when a goal is missed by more than 25 %"
	@echo "make clean             remove .venv and caches"

setup: .venv/ready
setup-dev: .venv/ready-dev

.venv/ready: pyproject.toml constraints.txt
	@echo "--- setting up .venv with pinned versions"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@

.venv/ready-dev: .venv/ready
	@echo "--- adding the test extras"
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev,baselines,blackbox]" hatchling
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
	$(BIN)/pytest -n auto --dist worksteal

slow: setup-dev
	$(BIN)/pytest -m slow

check-accounting: setup-dev
	$(BIN)/python benchmarks/check_accounting.py

audit: setup-dev
	@echo "--- the full audit, into results/audit.json and docs/audit.md; it goes on where it stopped"
	OMP_NUM_THREADS=1 $(BIN)/python -m reproduction.audit_sweep

results: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m reproduction.table --dataset mnist
	OMP_NUM_THREADS=1 $(BIN)/python -m reproduction.table --dataset fashion-mnist
	OMP_NUM_THREADS=1 $(BIN)/python -m reproduction.options
	$(BIN)/python -m reproduction.results_page

bench: setup-dev
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/page.py

bench-quick: setup-dev
	$(BIN)/python benchmarks/bench.py --quick

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
