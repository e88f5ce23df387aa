#!/usr/bin/env bash
# The checks that need a CUDA device: gpu-marked tests, then the GPU benches. At most fourteen
# minutes.
#
# Needs an environment with the `server`, `dev` and `cpu` (or `gpu`) extras on PATH. A bench that
# fails does not hide the next one; the exit status is 0 only when all of them passed.
#
#   benchmarks/gpu.sh [OUT]     the output goes to OUT as well, or to runs/gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-runs/gpu}
mkdir -p "$out"
failed=0

# step SECONDS NAME COMMAND...: run with a limit, keep the output, remember a failure.
step() {
    local limit_s=$1 name=$2
    shift 2
    echo "== $name (at most ${limit_s} s): $*"
    if ! timeout --kill-after=10 "$limit_s" "$@" 2>&1 | tee "$out/$name.log"; then
        echo "== $name: FAILED" >&2
        failed=1
    fi
}

step 20 device nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
step 240 tests python -m pytest -m gpu
step 120 attention python benchmarks/attention.py --device cuda --dtype bfloat16
step 180 verifier python benchmarks/verifier.py --device cuda --dtype bfloat16 --shape 8b \
    --sessions 1,8,64 --rows 1,8
step 240 bench edgespec bench --quick --device cuda --pass-ms 0
exit "$failed"
