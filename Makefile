# Nothing but make, Python and pip is needed. ARGS goes to the command: make test ARGS="-k staleness -x"
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup train test lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv, or bring it up to date (instant when it is)
	@$(PYTHON) scripts/setup_env.py

train: setup ## train; for example ARGS="--config configs/NAME.yaml"
	$(BIN)/estr-lite train $(ARGS)

test: setup ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

lint: setup ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean: ## remove caches and build leftovers; runs and .venv stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
