# Two commands need nothing but Python (3.11 to 3.13), make and a C++ compiler: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= compare-report
WORKERS ?= auto

.PHONY: demo test lint aot clean

demo: $(READY)
	$(BIN)/ckpt-ext compare --out $(OUT) $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Compiles every kernel for GPUs that need not be here.
aot: $(READY)
	$(BIN)/python -m bench.aot $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info ckpt_ext/*.so

# setuptools, pybind11 and ninja come first, since the extension is built in this environment, against this torch.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard csrc/*.* csrc/cuda/*.*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy setuptools wheel ninja pybind11
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@
