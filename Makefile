# Each target does its own set-up: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-stamp

.PHONY: help setup demo demo-control test fix

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

setup: $(STAMP) ## create .venv and install hybridflow with its development tools

# torch comes first: the version that all else is resolved against, whatever build the package index offers.
# pyright fetches its own program at its first start; doing it here keeps `make test` free of the network.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hybridflow needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	$(BIN)/pyright --version > /dev/null
	touch $@

demo: $(STAMP) ## a small model learns countdown by reinforcement learning, in minutes on a CPU
	$(BIN)/python examples/countdown_demo.py

demo-control: $(STAMP) ## the same time spent on supervised training alone, to compare with
	$(BIN)/python examples/countdown_demo.py --control

test: $(STAMP) ## every check: lint, format, types, layers, all tests that need no GPU and no vLLM
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest

fix: $(STAMP) ## repair what ruff can repair
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
