# `make demo`, `make test` and `make lint` set everything up by themselves: a virtual environment in .venv with exactly the
# packages of requirements.lock, made once and used again while the lock is unchanged.
#
#   PYTHON=python3.12 make test        another interpreter (3.11 to 3.13)
#   make test PYTEST_ARGS="-k preview" some of the tests

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
VENV := .venv
BIN := $(VENV)/bin
hash = $(shell git hash-object $(1) | cut -c 1-12)
PACKAGES := $(VENV)/.packages-$(call hash,requirements.lock)
INSTALLED := $(VENV)/.installed-$(call hash,requirements.lock)-$(call hash,pyproject.toml)
PYTEST_ARGS ?=
# two processes, each with whole files; PARALLEL= runs all in one
PARALLEL ?= -n 2 --dist loadfile
DEMO_ARGS ?=
BENCH_ARGS ?=

.PHONY: help demo test test-all lint format lock clean distclean setup
help:  ## this list
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## /\1\t/' | expand -t 14

demo: $(INSTALLED)  ## real clips -> shards -> verified -> a page to look at, in demo_out/
	$(BIN)/omniloom demo $(DEMO_ARGS)

test: $(INSTALLED)  ## all tests but the slow ones (many processes, minutes)
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(PYTEST_ARGS)

test-all: $(INSTALLED)  ## the slow ones, too: for changes of train/parallel and train/data
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)  ## style, types, import direction, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(INSTALLED)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-%: $(INSTALLED)  ## measurements, e.g. bench-pack
	$(BIN)/python -m jobs.bench.$* $(BENCH_ARGS)

lock: $(INSTALLED)  ## remake requirements.lock from requirements.in and requirements.overrides
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile requirements.in --override requirements.overrides --python-version 3.11 --universal \
		--no-header --no-annotate --quiet -o requirements.lock
	@if grep -n '://' requirements.lock; then echo "requirements.lock must not name hosts"; exit 1; fi

setup: $(INSTALLED)  ## only the virtual environment

$(PACKAGES):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "omniloom needs Python 3.11 to 3.13; name one: PYTHON=/path/to/python3.11 make ..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	rm -f $(VENV)/.packages-*
	touch $@

$(INSTALLED): | $(PACKAGES)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	rm -f $(VENV)/.installed-*
	touch $@

clean:  ## remove what was made, but not .venv
	rm -rf demo_out build dist *.egg-info .ruff_cache .mypy_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv, too
	rm -rf $(VENV)
