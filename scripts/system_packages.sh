#!/usr/bin/env bash
# Prints the Debian packages that are missing for a purpose, one line of names; empty when none is.
#
#   scripts/system_packages.sh demo|test|bench|lint           prints the names
#   scripts/system_packages.sh --check demo|test|bench|lint   explains on stderr and fails if any is missing
#
# PYTHON names the interpreter (default python3). CMake is not in the list: an old or missing one is
# replaced by PyPI's.
set -euo pipefail

check=0
if [ "${1:-}" = --check ]; then
  check=1
  shift
fi
purpose=${1:?expected demo, test, bench or lint}
python=${PYTHON:-python3}
missing=()
reasons=()

need() {
  missing+=("$1")
  reasons+=("  $1: $2")
}

if ! command -v "$python" >/dev/null; then
  need python3 "Python 3.11 or newer"
  need python3-venv "virtual environments"
  need python3-dev "Python's C headers"
else
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "kvspan: $python is Python $("$python" -c 'import platform; print(platform.python_version())');" \
      "expected 3.11 or newer (another one can be given as PYTHON=...)" >&2
    exit 1
  fi
  "$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv "virtual environments"
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    need python3-dev "Python's C headers"
fi

if [ "$purpose" != lint ]; then
  # GCC 11 is the first with all of the C++20 that the core uses.
  version=$("${CXX:-g++}" -dumpversion 2>/dev/null | cut -d. -f1 || true)
  if [ "${version:-0}" -lt 11 ]; then
    need g++ "a C++20 compiler, GCC 11 or newer${version:+ (found GCC $version)}"
  fi
fi
if [ "$purpose" = test ] &&
  ! echo '#include <gtest/gtest.h>' | "${CXX:-g++}" -x c++ -E - >/dev/null 2>&1; then
  need libgtest-dev "GoogleTest, for the C++ tests"
fi
if [ "$purpose" = test ] &&
  ! echo '#include <boost/graph/strong_components.hpp>' |
    "${CXX:-g++}" -x c++ -E - >/dev/null 2>&1; then
  need libboost-graph-dev "Boost.Graph, the oracle of the graph algorithms' C++ tests"
fi
if [ "$purpose" = bench ]; then
  echo '#include <benchmark/benchmark.h>' | "${CXX:-g++}" -x c++ -E - >/dev/null 2>&1 ||
    need libbenchmark-dev "Google Benchmark, for the C++ microbenchmarks"
  echo '#include <xxhash.h>' | "${CXX:-g++}" -x c++ -E - >/dev/null 2>&1 ||
    need libxxhash-dev "xxHash, for the optional xxh3-128 keys"
fi
if [ "$check" = 0 ]; then
  echo "${missing[*]:-}"
elif [ "${#missing[@]}" -gt 0 ]; then
  {
    echo "kvspan: these system packages are missing:"
    printf '%s\n' "${reasons[@]}"
    echo "Install them with: sudo apt-get install ${missing[*]}"
  } >&2
  exit 1
fi
