# Everything runs inside .venv, which is built once from the two pyproject.toml and constraints.txt: the
# library and the lab, both as they stand here.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Written last, and holds the path of this checkout: an interrupted install has no stamp, and an
# environment that was copied along with the tree is not mistaken for this one.
STAMP := $(VENV)/.installed
# The frameworks of tests/clients: half a minute more, which a demo need not wait for.
CLIENTS := $(VENV)/.clients
# What the site is built with.
DOCS := $(VENV)/.docs
# What distributions are built and checked with, and the fresh environment in which they are tried.
RELEASE := $(VENV)/.release
SMOKE := build/smoke
CONSTRAINTS ?= constraints.txt
PIP := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) PIP_DISABLE_PIP_VERSION_CHECK=1 \
  $(BIN)/python -m pip install --quiet -c $(CONSTRAINTS)
# Compiled files are written whatever the environment says: else every process that a test starts compiles egop anew.
OMP_NUM_THREADS ?= 1
MKL_NUM_THREADS ?= 1
export OMP_NUM_THREADS MKL_NUM_THREADS
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2
# What must come out the same on every CPU.
NUMERICAL := tests/numerics tests/basis tests/optim tests/refresh tests/test_rounding.py tests/test_reference.py
ARGS ?=

ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(shell rm -f $(STAMP))
endif

.DEFAULT_GOAL := help
.PHONY: help demo bench docs test numerical slow lint dist smoke clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## the digits network in both coordinate systems and a small language model: tables and a picture in egop-demo/ (options: ARGS="--epochs 20")
	@echo "Starting the demo (about a minute on two cores)"  # importing torch alone takes two seconds
	@$(BIN)/egop-lab demo $(ARGS)

bench: $(STAMP) ## what a step costs the host
	@$(BIN)/egop-lab bench $(ARGS)

docs: $(DOCS) ## the site, in build/docs/index.html; a warning fails
	rm -rf build/docs build/gallery.json docs/gallery-pages
	mkdir -p build
	$(BIN)/python -m sphinx -W --keep-going -q -E -d build/doctrees docs build/docs
	@echo "The site is $(CURDIR)/build/docs/index.html"

test: lint $(CLIENTS) ## lint, then all tests but the slow ones, on two processes (options: ARGS="-k optimizer")
	$(PYTEST) -m "not slow" $(ARGS)

numerical: $(CLIENTS) ## the numerical tests alone, as CI runs them with other CPU settings (MKL_CBWR, ATEN_CPU_CAPABILITY, threads)
	$(PYTEST) -q -m "not slow" $(NUMERICAL) $(ARGS)

slow: $(CLIENTS) ## the slow tests, which CI runs too: processes that are killed, whole races, times
	$(PYTEST) -m slow $(ARGS)

lint: $(STAMP) ## ruff (style and docstrings) and mypy (types)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist: $(RELEASE) ## build wheels and sdists of both distributions in dist/, and check them
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir dist lab
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

smoke: ## install what make dist has built in a fresh environment, and try it there
	@test -d dist || { echo 'There is no dist/: run make dist first.' >&2; exit 1; }
	rm -rf $(SMOKE)
	$(PYTHON) -m venv $(SMOKE)
	$(SMOKE)/bin/python -m pip install --quiet -c $(CONSTRAINTS) dist/egop-*.whl dist/egop_lab-*.whl
	cp .ci/smoke.py $(SMOKE)/ && cd $(SMOKE) && env -u PYTHONPATH bin/python smoke.py

clean: ## remove the environment and everything generated
	rm -rf $(VENV) egop-demo egop-records egop-report build dist .constraints-*.txt .pytest_cache .ruff_cache .mypy_cache .hypothesis docs/gallery-pages
	find src lab tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# No stamp: whatever is there may be half an environment, so start afresh. An old stamp: update in place.
$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'egop needs Python 3.11 or newer; "$(PYTHON)" is' "$$($(PYTHON) --version 2>&1 || true)."; \
	  echo 'Name another one: make PYTHON=/path/to/python3.11 ...'; exit 1; } >&2
	@test -f $@ || rm -rf $(VENV)
	@rm -f $@
	@echo "Making $(VENV) with $$($(PYTHON) --version) (a few minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[dev]' -e 'lab[theory]'
	@echo '$(CURDIR)' > $@

$(CLIENTS): $(STAMP)
	@$(PIP) -e '.[clients]'
	@touch $@

$(DOCS): $(STAMP)
	@$(PIP) -e '.[docs]'
	@touch $@

$(RELEASE): $(STAMP)
	@$(PIP) -e '.[release]'
	@touch $@
