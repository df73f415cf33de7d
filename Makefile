# SPDX-License-Identifier: Apache-2.0
# Each target first makes its environment; that takes minutes the first time only.
#   PYTHON      the Python for the environment (default: python3, or a newer one on PATH if that is too old)
#   OMNI_EXTRA  the build of vLLM: cpu (default) or cuda
#   WYOMING_PYTHON  a Python 3.12 or newer for wyoming-openai, a client of the slow tests (default: python3.12)
#   SAY         the sentence that `make demo` answers (default: a question)
#   PYTEST_ARGS further arguments of pytest
#   VLLM        another version of vLLM for the tests, on a CPU, such as 0.33: see scripts/vllm_overlay.py
#   TEST_LIMIT, TEST_SLOW_LIMIT  minutes after which `make test` and `make test-slow` are ended

PYTHON ?= python3
VENV ?= .venv
export CLIENTS_VENV ?= .venv-clients
OMNI_EXTRA ?= cpu
WYOMING_PYTHON ?= python3.12
TEST_LIMIT ?= 20
TEST_BUDGET ?= 5
TEST_SLOW_LIMIT ?= 60

BIN := $(VENV)/bin
STAMP := $(VENV)/.ready-$(OMNI_EXTRA)
DOCS_STAMP := $(VENV)/.ready-docs
CLIENTS_STAMP := $(CLIENTS_VENV)/.ready
CLIENTS_NPM := tests/clients/npm
CLIENTS_NPM_STAMP := $(CLIENTS_NPM)/node_modules/.package-lock.json
# Two processes; tests/conftest.py keeps tests that share an engine or a server in one of them. One that died is not replaced.
PYTEST_FLAGS := --numprocesses=2 --dist=loadfile --max-worker-restart=0
OVERLAY := $(VLLM:%=$(CURDIR)/build/vllm-%)
RUN_TESTS := $(if $(VLLM),PYTHONPATH=$(OVERLAY)$${PYTHONPATH:+:$$PYTHONPATH}) $(BIN)/python scripts/run_tests.py run
# The version that is tested beside the installed one: what depends on vLLM most, and a pipeline with its server.
NEXT_VLLM ?= 0.33
NEXT_TESTS := tests/test_vllm_seams.py tests/test_vllm_versions.py tests/core tests/worker tests/engine \
	tests/stage/test_llm_engine.py tests/entrypoints/openai/test_chat.py tests/entrypoints/openai/test_openai_client.py \
	tests/entrypoints/openai/test_responses.py tests/entrypoints/openai/test_vllm_paths.py \
	tests/entrypoints/test_vllm_methods.py

# A sentence may have quotes and `$`: neither make expands it nor the shell reads it.
export DEMO_SAY := $(value SAY)
unexport SAY

# With several threads, OpenMP's waiting threads slow tiny models down several times.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-next overlay seams clients programs screenshots lint docs model clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(STAMP)  ## Answer SAY="..." in text and speech, and let two models hear, see, speak and paint; writes demo_output/index.html
	$(BIN)/vllm-omni demo --say="$$DEMO_SAY"

test: overlay  ## Run the main tests
	$(RUN_TESTS) test$(VLLM:%=-on-%) --limit $(TEST_LIMIT) --budget $(TEST_BUDGET) -- $(PYTEST_FLAGS) -m "not slow" $(PYTEST_ARGS)

test-slow: overlay  ## Run the other tests
	-@$(MAKE) --no-print-directory clients
	$(RUN_TESTS) test-slow$(VLLM:%=-on-%) --limit $(TEST_SLOW_LIMIT) --budget 12 -- $(PYTEST_FLAGS) -m slow $(PYTEST_ARGS)

test-next:  ## Run the main tests of what depends on vLLM most on its next version
	$(MAKE) test VLLM=$(NEXT_VLLM) TEST_LIMIT=8 TEST_BUDGET=5 PYTEST_ARGS="$(NEXT_TESTS)"

overlay: $(STAMP)
	@$(if $(VLLM),$(BIN)/python scripts/vllm_overlay.py $(VLLM))

seams: $(STAMP)  ## Write scripts/vllm_seams again, after a change of what we take from vLLM
	$(BIN)/python scripts/vllm_overlay.py $(NEXT_VLLM)
	for path in "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" build/vllm-$(NEXT_VLLM); do \
		$(BIN)/python scripts/vllm_seams.py "$$path" --write; done

clients: $(CLIENTS_STAMP) $(CLIENTS_NPM_STAMP)  ## Install the clients that the slow tests run, in environments of their own

programs:  ## Install Chromium, systemd-analyze and nginx, which tests run (as root)
	scripts/install_programs.sh

screenshots: $(STAMP)  ## Make the pictures of docs/playground.md again
	$(BIN)/python scripts/screenshots.py

lint: $(STAMP)  ## Check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; else echo "hadolint has no build for this machine"; fi

docs: $(DOCS_STAMP)  ## Build the documentation into build/site, and open it without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	OMNI_SITE=build/site $(BIN)/python -m pytest -q tests/docs/test_site.py

model: $(STAMP)  ## Train the shipped models again (hours; resumes; see training/README.md)
	$(BIN)/python -m training

clean:  ## Remove the environment and all generated files
	rm -rf $(VENV) $(CLIENTS_VENV) $(CLIENTS_NPM)/node_modules build dist *.egg-info packages/*/build packages/*/*.egg-info .mypy_cache .pytest_cache .ruff_cache demo_output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml packages/coloured_shapes/pyproject.toml $(wildcard scripts/*.py scripts/*.txt)
	$(PYTHON) scripts/set_up.py $(VENV) $(STAMP) $(OMNI_EXTRA)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e ".[docs]" -c scripts/constraints.txt
	touch $@

# Python's own pip may be old, and then takes minutes to read the indexes. Most modules are never imported, nor compiled.
PIP_INSTALL := bin/python -m pip install --disable-pip-version-check --quiet --no-compile

$(CLIENTS_STAMP): $(wildcard tests/clients/requirements*.txt) | $(STAMP)
	$(BIN)/python -m venv --clear $(CLIENTS_VENV)
	$(CLIENTS_VENV)/$(PIP_INSTALL) "pip>=26"
	$(CLIENTS_VENV)/$(PIP_INSTALL) -r tests/clients/requirements.txt
	@if $(WYOMING_PYTHON) -c "" 2>/dev/null; then \
		$(WYOMING_PYTHON) -m venv $(CLIENTS_VENV)/wyoming && \
		$(CLIENTS_VENV)/wyoming/$(PIP_INSTALL) -r tests/clients/requirements-wyoming.txt; \
	else echo "The tests of wyoming-openai skip: no $(WYOMING_PYTHON) (make clients WYOMING_PYTHON=...)"; fi
	touch $@

$(CLIENTS_NPM_STAMP): $(CLIENTS_NPM)/package-lock.json
	@if command -v npm >/dev/null; then cd $(CLIENTS_NPM) && npm ci; else echo "npm is missing: the tests of its packages are skipped"; fi
