#!/bin/sh
# The benchmarks of docs/reference/figures.md that need a GPU, in one command of at most seven minutes:
#
#     tools/gpu_session.sh OUT [PYTHON]
#
# OUT gets gpu-table.{json,png,md,txt}, gpu-memory.{json,png,md} and gpu-training.{json,png,md}; `python -m benchmarks.docs OUT` puts them into
# the page. Needs a built library (`make build`), torch, rich and matplotlib; nothing is installed or built here.
#
# Of the kernels that the GPU prefers; with VOLTA_FA_FAMILY=volta in the environment, of Volta's. On a GPU newer than these families
# the driver compiles them from PTX at first use (seconds for each), and emulates Volta's tensor-core instructions, so the table stops to
# start shapes after 150 seconds. Its longest shapes come last: the table says what was left out. The largest eager case (fp32, N=8192, 32 heads) takes about 45 GiB; where that is not there, the table
# says so.
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
