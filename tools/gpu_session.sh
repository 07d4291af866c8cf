#!/bin/sh
# Runs the GPU benchmarks of docs/reference/figures.md, in at most seven minutes:
#
#     tools/gpu_session.sh OUT [PYTHON]
#
# Writes gpu-table.{json,png,md,txt}, gpu-memory.{json,png,md} and gpu-training.{json,png,md} to OUT.
# `python -m benchmarks.docs OUT` puts them into the page.
# Needs a built library (`make build`), torch, rich and matplotlib. Installs and builds nothing.
#
# Uses the GPU's preferred kernels, or Volta's with VOLTA_FA_FAMILY=volta.
# On a newer GPU, the driver compiles kernels from PTX at first use (seconds each) and emulates Volta's tensor-core instructions.
# So the table starts no shape after 150 seconds. Its longest shapes come last, and the table names the skipped ones.
# The largest eager case (fp32, N=8192, 32 heads) takes about 45 GiB. The table marks it if the GPU has less.
set -eu
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 OUT [PYTHON]" >&2
    exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
python=${2:-python3}
cd "$(dirname "$0")/.."
run() {
    timeout "$1" "$python" -m "benchmarks.$2" --device cuda --json "$out/gpu-$2.json" --plot "$out/gpu-$2.png" --markdown "$out/gpu-$2.md" $3
}
run 60 memory "--seqlens 512 1024 2048 4096 8192"
run 240 table "--time-limit 150" >"$out/gpu-table.txt"
cat "$out/gpu-table.txt"
run 120 training ""
