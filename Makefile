# Needs python3 (3.10 or later) with venv; everything else is installed into .venv.
PYTHON ?= python3
PORT ?= 30000
ALGORITHM ?= VEGAS
ARGS ?=

BIN := .venv/bin
STAMP := .venv/installed
SOURCES := sgl_vegas tests tools benchmark kernels

.PHONY: help serve test test-unit test-server test-gpu model lint format clean

help:
	@echo "make serve        serve the small model at PORT=$(PORT); ALGORITHM= for plain SGLang, ARGS= for flags"
	@echo "make test         lint, unit tests and server tests (no GPU needed)"
	@echo "make test-unit    unit tests only"
	@echo "make test-server  server tests only"
	@echo "make test-gpu     tests that need a CUDA device"
	@echo "make lint         ruff and pyright"
	@echo "make format       let ruff rewrite the sources"
	@echo "make clean        remove .venv and build output"

# Stamped, so that a second run costs nothing; another pyproject.toml installs again. Bytecode,
# because a server's start is mostly imports, and some environments never write it.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip uv
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python -e ".[dev,model]"
	touch $@

model: $(STAMP)
	$(BIN)/python tools/prepare_model.py

# prepare_model.py prints the model's folder, the only line on its standard output. `exec`, so that
# Ctrl-C and kill reach serve.py.
serve: $(STAMP)
	model=$$($(BIN)/python tools/prepare_model.py) && exec $(BIN)/python tools/serve.py \
		--model-path "$$model" --port $(PORT) --algorithm "$(ALGORITHM)" $(ARGS)

test: lint test-unit test-server

test-unit: $(STAMP)
	$(BIN)/python -m pytest tests/unit
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernel/test_step_ranking.py \
		tests/kernel/test_refresh_order.py

test-server: $(STAMP) model
	$(BIN)/python -m pytest tests/server

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu tests
	$(BIN)/python -m pytest tests/kernel/test_step_ranking.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python $(wildcard $(SOURCES))

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
