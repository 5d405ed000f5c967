# One way to run each thing; CONTRIBUTING.md says when.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The benchmarks compare with other libraries, which nothing else needs.
BENCHMARKS_VENV := .venv-benchmarks
BENCHMARKS_STAMP := $(BENCHMARKS_VENV)/.installed
# Not written into the call of `build`, where its comma would separate arguments.
BENCHMARKS_NEED := -r benchmarks/requirements.txt -e '.[examples,parquet]'
BENCHMARKS := tiny_step speed scaling exact start resume order checkpoint parquet shuffle linear_cross_entropy activation_checkpointing compile negatives batch_loss streams step_state

# The oldest torch that pyproject.toml admits; everything else as constraints.txt has it.
OLDEST_VENV := .venv-oldest
OLDEST_STAMP := $(OLDEST_VENV)/.installed
OLDEST_TORCH = $(shell sed -n 's/^    "torch>=\(.*\)",$$/\1/p' pyproject.toml)

# The Python that runs the GPU tests. Give one that has lanewise and a CUDA build of torch, and no .venv is needed:
#     make gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python

# How many GPUs there must be: make gpu GPUS=4
GPUS ?= 1

# Further arguments to pytest, for example: make test PYTEST_ARGS="tests/unit -x"
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test test-all test-part test-device test-oldest soak failures check fmt gpu benchmarks docs clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

venv: $(STAMP) ## build .venv with the development dependencies (done once, and again when they change)

# Builds the environment $(1) of what pip is told by $(2).
define build
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
    { echo "lanewise needs Python 3.11 or newer: '$(PYTHON)' is older, or is not there." \
           "Name another one: make $(or $(MAKECMDGOALS),venv) PYTHON=python3.12" >&2; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
    { echo "'$(PYTHON)' cannot build a virtual environment: its ensurepip or venv module is missing." \
           "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
@echo "building $(1)"
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
@$(1)/bin/python -m pip install --quiet --disable-pip-version-check -c $(or $(3),constraints.txt) $(2)
@touch $@
endef

$(STAMP): pyproject.toml constraints.txt
	$(call build,$(VENV),-e '.[dev]')
	@echo "building the emulated device, on which tests run what else needs an accelerator: half a minute, once"
	-@$(BIN)/python -m tests.fake_device.build

$(BENCHMARKS_STAMP): pyproject.toml constraints.txt benchmarks/requirements.txt
	$(call build,$(BENCHMARKS_VENV),$(BENCHMARKS_NEED))

$(OLDEST_STAMP): pyproject.toml constraints.txt
	@mkdir -p $(OLDEST_VENV)
	@sed 's/^torch==.*/torch==$(OLDEST_TORCH)/' constraints.txt > $(OLDEST_VENV)/constraints.txt
	$(call build,$(OLDEST_VENV),-e '.[dev]',$(OLDEST_VENV)/constraints.txt)

demo: $(STAMP) ## train the MNIST example on two processes, printing its accuracy on held-out digits
	$(BIN)/lanewise train examples/mnist/mnist.yaml --distributed.devices 2 \
	    --train.run_dir runs/mnist-$$(date +%Y%m%d-%H%M%S)
	@printf '%s\n' '' 'What to type next, for a small GPT of your own (without the first line it is $(BIN)/lanewise):' '' \
	    '    . $(BIN)/activate' '    lanewise init my_project'

# As many as cores, and two at least: a worker waits for what a test has started.
WORKERS := $(shell nproc 2>/dev/null | awk '{print ($$1 > 2 ? $$1 : 2)}')
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Empty, whatever the environment says: else each process that a test starts would compile every module again.
test test-all test-part test-oldest: export PYTHONDONTWRITEBYTECODE :=

test: $(STAMP) ## run the tests that need no GPU, but for the slow ones
	$(PYTEST) -m "not gpu and not slow" $(PYTEST_ARGS)

test-all: $(STAMP) ## run every test that needs no GPU
	$(PYTEST) -m "not gpu" $(PYTEST_ARGS)

test-part: $(STAMP) ## run a part of what is slow, with test-device, soak, failures and test-oldest: PART=2/5, or as HEAD chooses
	$(BIN)/python -m tests.part $(PART)

test-device: $(STAMP) ## run all tests on the emulated accelerator, in every order in which a device may work
	$(PYTEST) -m "not gpu" tests/gpu $(wildcard tests/distributed/fake_device/test_*.py) $(PYTEST_ARGS)

test-oldest: $(OLDEST_STAMP) ## run the architecture and unit tests with the oldest torch that is supported
	$(OLDEST_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not gpu and not slow" \
	    tests/architecture tests/unit $(PYTEST_ARGS)

soak: $(STAMP) ## kill a run 20 times, and lose or drain 30 hosts, at random moments and compare how it ends; load 5,000 damaged configurations
	PYTHONPATH=. $(BIN)/python -m tests.soak.kill_and_resume
	PYTHONPATH=. $(BIN)/python -m tests.soak.mutate_configurations
	PYTHONPATH=. $(BIN)/python -m tests.soak.lose_hosts

failures: $(STAMP) ## let a run fail in every way that is known, and write tests/integration/failures.md (as root, ten minutes)
	PYTHONPATH=. $(BIN)/python -m tests.integration.failure_table

check: $(STAMP) ## formatting, lint and types, without changing a file
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy examples/question_answering

fmt: $(STAMP) ## format, and mend what lint can mend by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP)) ## run what needs a GPU, and write its table to benchmarks/results.md
	@$(GPU_PYTHON) -c 'import sys, torch; found = torch.cuda.device_count(); sys.exit(None if found >= $(GPUS) else \
	    f"make gpu needs $(GPUS) CUDA devices: torch {torch.__version__} of $(GPU_PYTHON) sees {found}.")'
	timeout 6m $(GPU_PYTHON) -m pytest -m gpu -rs tests/gpu $(PYTEST_ARGS)
	timeout 9m $(GPU_PYTHON) benchmarks/gpu.py

benchmarks: $(BENCHMARKS_STAMP) ## compare with hand-written loops and other libraries, and write benchmarks/results.md and its numbers elsewhere (more than an hour)
	@failed=; for name in $(BENCHMARKS); do \
	    $(BENCHMARKS_VENV)/bin/python benchmarks/$$name.py --write || failed="$$failed $$name"; done; \
	$(BENCHMARKS_VENV)/bin/python docs/write_benchmarks.py; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

docs: $(STAMP) ## build the docs as a site in docs/_build; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build

clean: ## remove the environments, caches and built packages; runs/ stays
	rm -rf $(VENV) $(BENCHMARKS_VENV) $(OLDEST_VENV) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
