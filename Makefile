# Two commands matter: `make warm` and `make test`. Each makes what it needs in .venv/ and reuses it.
# On a machine with a GPU the environment is the [cuda] extra, elsewhere the pinned and hashed CPU environment.

PYTHON ?= $(shell command -v python3.11 >/dev/null 2>&1 && python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -q
TORCH := torch==2.13.0+cpu
# PyTorch's own public index of CPU builds: the one place beside PyPI that an install may need.
TORCH_INDEX := https://download.pytorch.org/whl/cpu
KIND := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
FILES := $(sort $(shell find orchestrator actors configs -name '*.py' -o -name '*.yaml'))
ARGS ?= --tp 2

.PHONY: warm test check test-gpu clean
warm: $(VENV)/project
	$(BIN)/replayssm-orch warm $(ARGS)

test: $(VENV)/project $(VENV)/dev
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_ARGS)

check: $(VENV)/project $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-gpu: $(VENV)/project $(VENV)/dev
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "replayssm-orch needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# torch is looked for where pip looks anyway (a local wheel, say), then in PyTorch's index of CPU builds.
$(VENV)/runtime-cpu: requirements/cpu.txt | $(BIN)/python
	@echo "installing the CPU environment into $(VENV) (a few minutes, once)"
	@$(PIP) install --no-deps $(TORCH) 2>/dev/null || { \
	  echo "torch: taking $(TORCH) from $(TORCH_INDEX)"; \
	  $(PIP) install --no-deps --index-url $(TORCH_INDEX) $(TORCH); }
	@$(PIP) install --no-deps --require-hashes -r requirements/cpu.txt
	@touch $@

$(VENV)/runtime-cuda: pyproject.toml | $(BIN)/python
	@echo "installing the CUDA environment into $(VENV) (a few minutes, once)"
	@$(PIP) install "setuptools>=77" wheel
	@$(PIP) install --config-settings editable_mode=strict -e ".[cuda]"
	@touch $@

$(VENV)/dev: requirements/dev.txt | $(BIN)/python
	@$(PIP) install --no-deps --require-hashes -r requirements/dev.txt
	@touch $@

# The strict editable install links every file, so that mypy sees the packages under their full name: redone when the
# set of files changes, not when their content does.
$(VENV)/files: FORCE | $(BIN)/python
	@echo '$(FILES)' | cmp -s - $@ || echo '$(FILES)' > $@

$(VENV)/project: $(VENV)/runtime-$(KIND) $(VENV)/files pyproject.toml
	@rm -rf build
	@$(PIP) install --no-deps --no-build-isolation --config-settings editable_mode=strict -e .
	@touch $@

FORCE:
