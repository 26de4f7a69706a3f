#!/usr/bin/env bash
# Builds kvspan for this machine's GPU, runs the tests of devices on it and measures it against its
# own copies. For a bare machine: Python with torch, transformers, pytest, hypothesis, PyYAML, tqdm,
# scikit-build-core and pybind11; CMake, Ninja and nvcc. Nothing is downloaded, and nothing is
# installed outside build/gpu.
#
#   scripts/gpu.sh [NAME]     writes bench/results/devices_NAME.json (default: the device's name)
#
# PYTHON  the interpreter (default python3)
# WHEELS  a folder of wheels that it lacks; if kvspan is among them, it is used and nothing is built
# OUT     the folder of the results (default bench/results)
# DEVICE  cuda (default), or cpu: a rehearsal of all this without a GPU
# SANITIZER  a tool of compute-sanitizer (memcheck, racecheck) to run the tests of kernels under
# PYTEST_ARGS, TOKENS, REPEATS  arguments of pytest; tokens that are moved and samples of a bench
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3} device=${DEVICE:-cuda} out=${OUT:-bench/results}
site=$PWD/build/gpu/site

rm -rf build/gpu
mkdir -p "$site" "$out"
install() {
  "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --target "$site" "$@"
}
if [ -n "${WHEELS:-}" ]; then
  install "$WHEELS"/*.whl
fi
export PYTHONPATH=$site PYTHONUNBUFFERED=1

name=$("$python" - "$device" <<'PY'
import sys
import torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("gpu.sh: torch finds no CUDA device (DEVICE=cpu rehearses without one)")
cuda = sys.argv[1] == "cuda"
name = torch.cuda.get_device_name() if cuda else "cpu"
major, minor = torch.cuda.get_device_capability() if cuda else (9, 0)
print(name.lower().replace("nvidia", "").strip().replace(" ", "_"), f"{major}{minor}")
PY
)
read -r name arch <<<"$name"
name=${1:-$name}

if [ ! -d "$site/kvspan" ]; then
  CUDAARCHS=${CUDAARCHS:-$arch} "$python" -m pip wheel -q --disable-pip-version-check . --no-deps \
    --no-build-isolation -w build/gpu -C build-dir=build/gpu/cmake -C cmake.define.KVSPAN_CUDA=ON
  install build/gpu/kvspan-*.whl
fi
"$python" -c 'import sys, kvspan.ops as ops
print(f"kvspan: {ops.cuda_status()}")
sys.exit(sys.argv[1] == "cuda" and not ops.cuda_status()[0].isdigit())' "$device"

# From the tests' folder: the sources must not stand in for what was built.
failed=0
if [ -n "${SANITIZER:-}" ]; then
  (cd tests/python && compute-sanitizer --tool "$SANITIZER" --error-exitcode 9 "$python" -m pytest -q \
    -p no:cacheprovider test_devices.py test_gated_delta_devices.py -k "$device") || failed=1
fi
(cd tests/python && "$python" -m pytest -q -p no:cacheprovider test_devices*.py \
  test_gated_delta_devices.py test_copy_queue.py test_streams.py ${PYTEST_ARGS:-}) || failed=1
"$python" bench/devices.py --device "$device" --tokens "${TOKENS:-16384}" --repeats "${REPEATS:-9}" \
  --json "$out/devices_$name.json" || failed=1
"$python" bench/gated_delta_peers.py --device "$device" --repeats "${REPEATS:-9}" \
  --json "$out/gated_delta_$name.json" || failed=1
exit $failed
