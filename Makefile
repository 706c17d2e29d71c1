# `make demo` and `make test` need nothing but Python 3.11 or newer: each makes .venv, or its part of it, when that is
# missing or old.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# One environment in two steps: what the demo needs, and on top of that what tests and linters need.
FOR_DEMO := $(VENV)/.installed-for-demo
INSTALLED := $(VENV)/.installed
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
ENGINES ?= vllm sglang routers
FRAMEWORKS ?= trl verl vllm$(if $(PART), openrlhf)

# Tests start some hundred processes: Python files are compiled once, not in each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo grpo test test-engines test-frameworks test-slow fuzz bench lint format proto api clean fault-matrix endurance mutants

demo: DEMO_ENGINE = $(strip $(foreach engine,vllm sglang,$(findstring $(engine),$(ARGS))))
demo: $(FOR_DEMO)
	@$(if $(DEMO_ENGINE),engines/run $(DEMO_ENGINE) --) $(BIN)/ckpt-engine demo $(ARGS)

# A small model learns by GRPO (TRL) from two replicas behind the gateway; needs no GPU. Ends with a plot.
grpo: $(INSTALLED)
	examples/grpo/run $(ARGS)

# More files at a time than processors, since most tests wait for processes that they have started: with four or five at a
# time two processors had nothing to do for a fifth of `make test`, and one more costs six seconds of imports. Those that
# take longest first (tests/conftest.py). The linters run among them.
FILES_AT_A_TIME = --numprocesses $(1) --dist loadfile --no-loadscope-reorder

# Folders of which every test is left out: each process would import them for nothing.
HERE_ONLY = --ignore=tests/gpu --ignore=tests/frameworks

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not engine and not framework and not gpu and not slow" $(HERE_ONLY) $(call FILES_AT_A_TIME,6) $(ARGS)

# Real inference engines on the CPU, and real routers, in environments of their own that are cached outside the checkout.
# Two files at a time: the start of a server is half a minute of imports, one after another.
# PART=slow: the whole conformance suite by way of a relay, engines on other hosts than the trainer (root), kills at more
# stages, and many streams in more pause modes.
test-engines: $(INSTALLED)
	$(if $(filter-out slow,$(PART)),$(error PART=$(PART): there is PART=slow, and all else without PART))
	engines/run $(ENGINES) -- $(BIN)/python -m pytest -m "engine and not gpu and $(if $(PART),,not )slow" --timeout=1200 $(call FILES_AT_A_TIME,2) $(ARGS)

# Real training frameworks, with replicas of the reference engine and of vLLM. PART=slow: Ray of several nodes, which die;
# and OpenRLHF, whose environment is made for this part only.
test-frameworks: $(INSTALLED)
	$(if $(filter-out slow,$(PART)),$(error PART=$(PART): there is PART=slow, and all else without PART))
	engines/run $(FRAMEWORKS) -- $(BIN)/python -m pytest tests/frameworks -m "$(if $(PART),,not )slow" --timeout=1200 $(ARGS)

# Repetitions, most of a million simulated events, and real engines by way of relays. PART=ci: without the engines, and
# without what takes very long or repeats what another test asks (marked `hours`).
SLOW = slow and not engine and not framework and not gpu$(if $(PART), and not hours)

test-slow: $(INSTALLED)
	$(if $(filter-out ci,$(PART)),$(error PART=$(PART): there is PART=ci, and all of it without PART))
	$(BIN)/python -m pytest -m "$(SLOW)" --timeout=1800 $(HERE_ONLY) $(call FILES_AT_A_TIME,6) $(ARGS)
	$(if $(PART),,$(MAKE) test-engines PART=slow ENGINES="$(filter-out routers,$(ENGINES))")
	$(if $(PART),,$(MAKE) test-frameworks PART=slow)

# A million damaged messages for everything that reads what another process sent (docs/security.md).
fuzz: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "atheris>=3"
	$(BIN)/python -m tests.fuzz.run --inputs 1000000 --atheris $(ARGS)

# Faults on real processes: every cell, into docs/reliability.md; and many updates with random kills.
fault-matrix: $(INSTALLED)
	$(BIN)/python -m tests.faults.matrix $(ARGS)

# Mistakes in the code that the promises rest on: those that its tests do not notice (docs/reliability.md).
mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants --count 100 $(ARGS)

endurance: $(INSTALLED)
	$(BIN)/python -m tests.faults.endurance $(ARGS)

bench: $(INSTALLED)
	$(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-json=benchmarks/latest.json --timeout=1800 $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Regenerates ckpt_engine/v1 from proto/.
proto: $(INSTALLED)
	$(BIN)/python proto/generate.py

# The API reference, docs/api.md, from the code.
api:
	$(PYTHON) docs/generate_api.py

# torch comes first: later packages are then content with it instead of bringing a build of their own. pip shows what it
# fetches, since this takes minutes.
$(FOR_DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: set PYTHON="'
	@echo "Installing what the demo needs into $(VENV), once. Most of it is torch."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) --editable ".[demo,postgresql]"
	@touch $@

$(INSTALLED): $(FOR_DEMO)
	@echo "Installing what tests and linters need into $(VENV), once."
	@$(PIP_INSTALL) --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
