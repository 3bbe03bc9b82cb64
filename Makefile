# Two commands matter: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test nightly lint format protos install clean

demo: install
	$(BIN)/python -m demo

test: install
	$(BIN)/python -m pytest -m "not nightly and not gpu"

nightly: install
	$(BIN)/python -m pytest -m nightly

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/buf lint

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

protos: install
	PATH="$(abspath $(BIN)):$$PATH" protos/generate.sh

install: $(STAMP)

$(STAMP): requirements-cpu.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Flotilla needs Python 3.11 or 3.12; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12") if sys.version_info[:2] not in ((3, 11), (3, 12)) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python -r requirements-cpu.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
