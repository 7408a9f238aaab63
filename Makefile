# Everything runs in .venv, made on first use; a target run again installs nothing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

# The CPU is the one machine everyone has. `make train JAX_PLATFORMS=` uses the best.
export JAX_PLATFORMS ?= cpu

.PHONY: help train train-text test test-short test-slow test-aot test-torch coverage \
  check mutants lint format clean
.DEFAULT_GOAL := help

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train,plot,demo]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ $(VENV)/.train

$(VENV)/.aot: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[aot-gpu,test]'
	@touch $@ $(VENV)/.test $(VENV)/.train

$(VENV)/.torch: pyproject.toml | $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@touch $@

train: $(VENV)/.train       ## train a ResNet on MNIST digits in mixed float16
	$(BIN)/opsnn train examples/mnist.yaml

train-text: $(VENV)/.train  ## train a small GPT on the Python manual
	$(BIN)/opsnn train examples/text.yaml

# Without most of XLA's optimizations, which take longer than the tests; but for those
# marked `optimized`.
test: $(VENV)/.test         ## run the tests (about ten minutes on two cores)
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST) -n 2 -m 'not slow and not aot' tests

# With all of XLA's optimizations: also where the bounds on rounding errors are held.
test-short: $(VENV)/.test   ## run the tests that depend most on the version of JAX
	$(PYTEST) -n 2 -m 'not slow and not aot' tests/test_dispatch.py tests/test_explain.py \
	  tests/kernels tests/nn tests/test_public_ops.py tests/ops/test_conv_winograd.py \
	  tests/ops/test_conv_implementations.py tests/ops/test_attention_cudnn.py \
	  tests/training/test_step.py tests/training/test_master_weights.py

test-slow: $(VENV)/.test    ## run the long tests
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST) -n 2 -m 'slow and not aot' tests

test-aot: $(VENV)/.aot      ## compile the kernels for absent TPUs and GPUs
	$(PYTEST) -n 2 -m aot tests

test-torch: $(VENV)/.torch  ## compare the ops with PyTorch
	$(PYTEST) tests/check/test_frameworks.py

coverage: $(VENV)/.aot      ## run all but the long tests and say which lines none reaches
	$(PYTEST) -n 2 -m 'not slow' --cov --cov-report=term-missing:skip-covered \
	  --cov-fail-under=90 tests

check: $(VENV)/.test        ## hold every op and implementation against its contract
	$(BIN)/opsnn check

mutants: $(VENV)/.test      ## plant bugs and see that the tests catch each
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m tests.mutants.run

lint: $(VENV)/.test         ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test       ## fix style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:                      ## remove the virtual environment and run folders
	rm -rf $(VENV) runs
