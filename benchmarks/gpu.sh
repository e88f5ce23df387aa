#!/usr/bin/env bash
# The checks that need a CUDA device: passes of an 8B shape, gpu-marked tests, the bench.
# At most nine minutes, what matters most first; nothing is downloaded, and the 8B checkpoint is
# random (16 GB under TMPDIR while it runs, as much memory, and 20 GB of the device's).
#
# Needs an environment with the `server`, `dev` and `cpu` (or `gpu`) extras on PATH. A step that
# fails or runs out of time does not hide the next one; the exit status is 0 only when all passed.
#
#   benchmarks/gpu.sh [OUT]       the output goes to OUT as well, or to runs/gpu
#   DEVICE=cpu benchmarks/gpu.sh  a rehearsal without a GPU: the same steps with small shapes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-runs/gpu}
device=${DEVICE:-cuda}
mkdir -p "$out"
failed=0

# step SECONDS NAME COMMAND...: run with a limit, keep the output, remember a failure.
step() {
    local limit_s=$1 name=$2
    shift 2
    echo "== $name (at most ${limit_s} s): $*"
    if ! timeout --kill-after=5 "$limit_s" "$@" 2>&1 | tee "$out/$name.log"; then
        echo "== $name: FAILED" >&2
        failed=1
    fi
}

shape=(--shape 8b --dtype bfloat16 --canonical --sessions 1,8,64 --rows 1,8)
if [ "$device" = cuda ]; then
    step 10 device nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
else
    shape=(--shape small --canonical --sessions 1,8 --rows 1,8 --passes 3)
fi
step 200 verifier python benchmarks/verifier.py --device "$device" "${shape[@]}" \
    --json "$out/verifier.json"
step 160 tests python -m pytest -m gpu
step 100 bench edgespec bench --quick --pass-ms 0
exit "$failed"
