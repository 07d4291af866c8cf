#!/usr/bin/env bash
# Validates a built library on a GPU and writes logs to OUTPUT: the GPU tests, 2,000 random problems, the examples,
# then compute-sanitizer's memcheck, racecheck and initcheck on every kernel.
#
#   tools/gpu/validate.sh OUTPUT                           all steps; pytest and sweep also with Volta's kernels alone (volta-...)
#   tools/gpu/validate.sh OUTPUT sweep volta-racecheck     some steps: [volta-]{pytest,sweep,memcheck,racecheck,initcheck}, examples
#   tools/gpu/validate.sh OUTPUT figures                   only the GPU benchmarks of docs/reference/figures.md, at most seven minutes
#
#   SWEEP="--hypothesis-seed 7"           arguments of pytest for other random problems
#   KERNELS='turing_fwd_*'                kernels that the sanitizers force (default: all that the GPU runs)
#   EXAMPLES=300                          number of random problems (default: 2000)
#   LIMIT=120                             time limit of a step, in seconds
#
# `figures` writes gpu-{table,memory,training}.{json,png,md}; `python -m benchmarks.docs OUTPUT` puts them into the page. It needs rich and
# matplotlib. On a newer GPU, the driver compiles kernels from PTX at first use (seconds each) and emulates Volta's tensor-core
# instructions, so the table starts no shape after 150 seconds: it names the skipped ones, which are the longest. Its largest eager case
# (fp32, N=8192, 32 heads) takes about 45 GiB, and the table marks it if the GPU has less.
set -uo pipefail
cd "$(dirname "$0")/../.."
output=${1:?usage: tools/gpu/validate.sh OUTPUT [STEP...]}
shift
mkdir -p "$output"
failed=0

# step NAME COMMAND...: runs a command, and keeps its output in NAME.log
step() {
    local name=$1 start=$SECONDS
    shift
    echo "== $name: $*"
    if timeout "${LIMIT:-3600}" "$@" >"$output/$name.log" 2>&1; then echo "   passed, $((SECONDS - start)) s"; else
        echo "   FAILED, $((SECONDS - start)) s"
        failed=1
    fi
    tail -n 4 "$output/$name.log"
}

# sanitize TOOL FAMILY: an empty FAMILY lets the GPU run its own
sanitize() {
    local tool=$1 family=$2
    # the caching allocator hides accesses from one tensor to another in the same block
    step "${family:+$family-}$tool" env VOLTA_FA_FAMILY="$family" PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" \
        --error-exitcode 9 --kernel-name-exclude kernel_substring=at:: python3 tools/gpu/sanitizer_cases.py --kernels "${KERNELS:-*}"
}

# figures BENCHMARK ARGUMENT...: runs benchmarks/BENCHMARK.py
figures() {
    local name=gpu-$1 module=benchmarks.$1
    shift
    step "$name" python3 -m "$module" --device cuda --json "$output/$name.json" --plot "$output/$name.png" --markdown "$output/$name.md" "$@"
}

if [ $# -eq 0 ]; then
    set -- pytest sweep examples memcheck racecheck initcheck volta-pytest volta-sweep
fi
for name in "$@"; do
    family=""
    case $name in volta-*) family=volta ;; esac
    case ${name#volta-} in
    pytest) step "$name" env VOLTA_FA_FAMILY=$family VOLTA_FA_TEST_REQUIRE=cuda python3 -m pytest -q -m cuda tests ;;
    sweep) step "$name" env VOLTA_FA_FAMILY=$family VOLTA_FA_TEST_REQUIRE=cuda VOLTA_FA_TEST_EXAMPLES="${EXAMPLES:-2000}" \
        python3 -m pytest -q -k random_combinations_cuda tests/test_dropout.py ${SWEEP:-} ;;
    figures)
        LIMIT=60 figures memory --seqlens 512 1024 2048 4096 8192
        LIMIT=240 figures table --time-limit 150
        LIMIT=120 figures training
        ;;
    examples) step "$name" python3 -m pytest -q tests/test_examples.py ;;
    memcheck | racecheck | initcheck) sanitize "${name#volta-}" "$family" ;;
    *)
        echo "$0: no step $name" >&2
        exit 2
        ;;
    esac
done
exit $failed
