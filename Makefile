# `make demo` shows it, `make test` checks it. Each target sets up .venv itself; nothing else is installed anywhere.
#   PYTHON=python3.13   the interpreter (3.11 or newer)      ARGS='-k breaker'   more words for pytest
PYTHON ?= python3
TESTFLAGS ?= -n auto --maxprocesses 4 --dist loadgroup
ARGS ?=

BIN := .venv/bin
READY := .venv/.ready

# a folder that was moved or copied after set-up has a .venv that points to the old place
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test lint ruff mypy imports bench chaos soak clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' Makefile

$(READY): pyproject.toml constraints.txt .ci/venv
	@bash .ci/venv "$(PYTHON)" .venv

demo: $(READY) ## a batch over three sample endpoints, one of which fails for a while (under 30 s)
	@$(BIN)/headrace demo

test: $(READY) ## all tests
	@$(BIN)/python -m pytest $(TESTFLAGS) -m 'not alone' $(ARGS)
	@$(BIN)/python -m pytest -m alone $(ARGS) || [ $$? -eq 5 ] # 5: none of those that ARGS asks for

lint: ruff mypy imports ## ruff, mypy --strict, import rules

ruff: $(READY)
	@$(BIN)/ruff check --quiet --output-format concise .

mypy: $(READY)
	@$(BIN)/mypy --no-error-summary

imports: $(READY)
	@said=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$said"; exit 1; }

bench: $(READY) ## all measurements against all peers, half an hour (ARGS='--small', ARGS='--repeats 1 drain'; ARGS=--help)
	@$(BIN)/headrace bench $(ARGS)

chaos: $(READY) ## inject FAULTS=1000 faults with SEED=1 and check that nothing is lost (ARGS='--only kill-one')
	@$(BIN)/python -m tests.chaos --faults $(or $(FAULTS),1000) --seed $(or $(SEED),1) $(ARGS)

soak: $(READY) ## MINUTES=30 of steady load; fails if memory, descriptors or keys grow
	@$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),30) $(ARGS)

clean: ## remove .venv, caches and the data of the embedded server
	@rm -rf .venv .venv-* .headrace .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	@find broker workers tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
