# Two commands are all a newcomer needs: `make demo` and `make test`.
# Everything is installed into .venv; nothing outside this folder is changed, except that
# `make test` run as root installs the system packages that the browser tests need.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
UV     := $(BIN)/python -m uv
STAMPS := .stamps

export SKIP_JUPYTER_BUILDER := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test env-test lint types unit notebooks lab system docs bench clean help

help:            ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 14

demo: $(STAMPS)/demo  ## run the first notebook on warm pods and print what happened
	@$(BIN)/python examples/demo.py

test: env-test lint types unit notebooks  ## everything that CI runs
	@echo "all checks and tests passed"

env-test: system $(STAMPS)/test lab

$(STAMPS)/venv: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Firepool-nb needs Python 3.10 or newer: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q uv
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/demo: $(STAMPS)/venv pyproject.toml constraints.txt
	@echo "installing Firepool-nb into $(VENV) (once) ..."
	@mkdir -p firepool_nb/labextension
	@$(UV) pip install -q --python $(BIN)/python -c constraints.txt -e '.[demo]'
	@touch $@

$(STAMPS)/test: $(STAMPS)/venv pyproject.toml constraints.txt
	@mkdir -p firepool_nb/labextension
	$(UV) pip install -q --python $(BIN)/python -c constraints.txt -e '.[test]'
	@touch $@ $(STAMPS)/demo

system:          ## system packages that the tests need (only as root)
	@tests/install-system-packages

LAB_SOURCES := $(shell find labextension/src labextension/style -type f) labextension/package.json labextension/package-lock.json
lab: $(STAMPS)/lab  ## build the JupyterLab panel
$(STAMPS)/lab: $(LAB_SOURCES) $(STAMPS)/test
	cd labextension && npm ci --no-audit --no-fund --loglevel=error && PATH="$(CURDIR)/$(BIN):$$PATH" npm run build:prod
	$(UV) pip install -q --python $(BIN)/python --no-deps --reinstall-package firepool-nb -e .
	@touch $@

lint:            ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:           ## mypy, strict
	$(BIN)/mypy

unit:            ## all tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

notebooks:       ## the example notebooks, executed
	$(BIN)/python examples/check.py

bench:           ## the figures of docs/performance.md
	$(BIN)/firepool bench

clean:           ## remove what the commands above made
	rm -rf $(VENV) $(STAMPS) .mypy_cache .ruff_cache .pytest_cache .hypothesis test-artifacts labextension/node_modules labextension/lib firepool_nb/labextension
