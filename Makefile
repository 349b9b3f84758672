# `make demo` and `make test` work on a fresh machine with Python 3.11+ and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-install test-live test-slow check clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,live,secure]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/tacita demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not live"

test-install:
	PYTHON="$(PYTHON)" .ci/clean-install

test-live: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m live tests/live

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
