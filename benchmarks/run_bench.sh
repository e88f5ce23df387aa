#!/usr/bin/env bash
# All arms at five round-trip times with the bundled pair: about a quarter of an hour.
#
#   benchmarks/run_bench.sh [OUT.json] [OPTION...]     options go to `edgespec bench`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-runs/bench-$(date -u +%Y%m%dT%H%M%SZ).json}
exec edgespec bench --json "$out" "${@:2}"
