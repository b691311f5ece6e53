# Every target sets up what it needs in .venv; nothing else on the machine is touched.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
# torch comes first and pinned: a plain `pip install torch` may fetch a newer one together with gigabytes of CUDA.
TORCH ?= torch==2.13.0

.PHONY: help demo test check bench docs clean

help: ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/'

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,bench,train]"
	touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $@

demo: $(READY) ## the shipped model answers the same thing twice, plainly and speculatively
	$(BIN)/forerun demo $(ARGS)

test: $(READY) ## all tests
	$(BIN)/python -m pytest $(ARGS)

check: $(READY) ## ruff, formatting, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## the measured figures beside their goals
	$(BIN)/python -m forerun.bench $(ARGS)

docs: $(DOCS_READY) ## the documentation as a site in build/site
	$(BIN)/zensical build

clean: ## forget the environment and everything built
	rm -rf $(VENV) build/site
