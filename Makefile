# `make serve` and `make test` work in a fresh clone: they make the environment and the model first.
#
#   make serve [PORT=30000] [ALGORITHM=VEGAS] [MODEL=folder] [ARGS="further SGLang flags"]
#   make serve ALGORITHM=        plain SGLang
#   make test | test-unit | test-server | test-gpu | lint | format | clean

PORT ?= 30000
ALGORITHM ?= VEGAS
MODEL ?=
ARGS ?=
# Python 3.10 or newer, to make the environment with.
PYTHON3 ?= python3

VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
CODE := sgl_vegas tests tools benchmark

.PHONY: serve model test test-unit test-server test-gpu lint format clean

serve: $(if $(MODEL),$(INSTALLED),model)
	@exec $(PYTHON) -m tools.serve --port $(PORT) --algorithm "$(ALGORITHM)" \
		$(if $(MODEL),--model-path "$(MODEL)") -- $(ARGS)

test: lint model
	$(PYTHON) -m pytest tests/unit tests/server

test-unit: $(INSTALLED)
	$(PYTHON) -m pytest tests/unit

test-server: model
	$(PYTHON) -m pytest tests/server

test-gpu: $(INSTALLED)
	$(PYTHON) -m pytest -m gpu tests

lint: $(INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright --pythonpath $(PYTHON)

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

model: $(INSTALLED)
	@$(PYTHON) -m tools.prepare_model

# The stamp makes a second run free. uv installs the several GB of SGLang's dependencies faster.
$(INSTALLED): pyproject.toml
	@echo "Making $(VENV) with SGLang; the first time takes minutes."
	$(PYTHON3) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet uv || echo "No uv; using pip."
	if [ -x $(VENV)/bin/uv ]; then \
		$(VENV)/bin/uv pip install --python $(PYTHON) -e '.[dev,model]'; \
	else \
		$(PYTHON) -m pip install -e '.[dev,model]'; \
	fi
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +
