# make demo, make test: each does all of its own set-up in .venv. `make help` lists the rest.
# Stamp files in .venv say what is installed, so that a second run starts at once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# Build folder of the C++ tests, and further CMake options for it.
CPP_BUILD := build/cpp-tests
CMAKE_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Test modules side by side, of one thread each; every one takes about 1 GiB.
PYTEST_JOBS ?= $(shell echo $$(($(JOBS) < 4 ? $(JOBS) : 4)))
BENCH_ARGS ?=

export PATH := $(CURDIR)/$(BIN):$(PATH)

CPP_FILES := $(shell find cpp cuda bindings tests/cpp bench/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
NATIVE := CMakeLists.txt $(wildcard cmake/*) $(shell find cpp cuda bindings -type f)

.PHONY: help demo test test-cpp test-python bench lint format clean \
  system-demo system-test system-bench system-lint

help:
	@echo "make demo    see a real model answer over passages, without and with reuse"
	@echo "make test    C++ and Python tests"
	@echo "make bench   C++ microbenchmarks, then the peer comparisons"
	@echo "make lint    formatting, linters and types"
	@echo "make format  put the sources into the project's format"
	@echo "make clean   remove build folders and .venv"
	@echo "Options: PYTHON=python3.12  DEMO_ARGS='--questions 4'  PYTEST_ARGS='-k demo'  JOBS=4"
	@echo "         BENCH_ARGS='hash --json hash.json'"

demo: system-demo $(VENV)/.demo
	@$(BIN)/kvspan demo $(DEMO_ARGS)

test: test-cpp test-python

test-cpp: system-test $(VENV)/.cmake
	cmake -S . -B $(CPP_BUILD) -DKVSPAN_BUILD_TESTS=ON -DKVSPAN_BUILD_PYTHON=OFF $(CMAKE_ARGS)
	cmake --build $(CPP_BUILD) --parallel $(JOBS)
	ctest --test-dir $(CPP_BUILD) --output-on-failure --parallel $(JOBS)

test-python: system-test $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_JOBS) --dist loadfile $(PYTEST_ARGS)

bench: system-bench $(VENV)/.demo
	cmake -S . -B build/bench -DKVSPAN_BUILD_BENCH=ON -DKVSPAN_BUILD_PYTHON=OFF $(CMAKE_ARGS)
	cmake --build build/bench --parallel $(JOBS)
	for bench in build/bench/bench/cpp/kvspan_bench_*; do \
	  if [ -x "$$bench" ]; then "$$bench" --benchmark_out="$$bench.json"; fi; done
	$(BIN)/python bench/core_peers.py $(BENCH_ARGS)

lint: system-lint $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

format: system-lint $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

clean:
	rm -rf build build-* dist .venv .pytest_cache .mypy_cache .ruff_cache

system-demo system-test system-bench system-lint: system-%:
	@PYTHON='$(PYTHON)' scripts/system_packages.sh --check $*

$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	touch $@

# PyPI's CMake where the system has none that is new enough (3.25).
$(VENV)/.cmake: constraints.txt | $(VENV)/.venv
	if ! cmake --version 2>/dev/null | awk 'NR == 1 { split($$3, v, "."); \
	    exit !(v[1] > 3 || (v[1] == 3 && v[2] >= 25)) }'; then \
	  $(PIP) install -q -c constraints.txt cmake; \
	fi
	touch $@

# What builds the extension; with it pip needs no build environment of its own, and the build
# folder is used again.
$(VENV)/.build-tools: Makefile constraints.txt | $(VENV)/.cmake
	$(PIP) install -q -c constraints.txt scikit-build-core pybind11 ninja
	touch $@

# Python files are used in place (an editable installation): only native ones need a new build.
$(VENV)/.demo: $(NATIVE) pyproject.toml constraints.txt $(VENV)/.build-tools
	@echo "Installing kvspan and what it needs into $(VENV); the first time takes a few minutes."
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[demo,dev]'
	touch $@

$(VENV)/.lint: Makefile constraints.txt | $(VENV)/.venv
	$(PIP) install -q -c constraints.txt ruff mypy clang-format numpy tqdm huggingface_hub types-PyYAML \
	  starlette uvicorn pydantic prometheus_client openai argcomplete \
	  types-tqdm
	touch $@
