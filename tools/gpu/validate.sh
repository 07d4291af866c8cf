#!/usr/bin/env bash
# On a machine with a GPU and a built library: the GPU tests, two bit-identical runs included, 2,000 random problems, the
# examples, then compute-sanitizer's memcheck, racecheck and initcheck on a small set. Logs go to the given folder.
#
#   tools/gpu/validate.sh OUTPUT
set -uo pipefail
cd "$(dirname "$0")/../.."
output=${1:?usage: tools/gpu/validate.sh OUTPUT}
mkdir -p "$output"
failed=0

step() {
    local name=$1
    shift
    echo "== $name: $*"
    if "$@" >"$output/$name.log" 2>&1; then echo "   passed"; else
        echo "   FAILED"
        failed=1
    fi
    tail -n 4 "$output/$name.log"
}

# with the families that this GPU prefers, and with Volta's alone, which are what a V100 runs
for family in "" volta; do
    step "pytest$family" env VOLTA_FA_FAMILY=$family VOLTA_FA_TEST_REQUIRE=cuda python3 -m pytest -q -m cuda tests
    step "sweep$family" env VOLTA_FA_FAMILY=$family python3 tools/gpu/sweep.py
done
step examples python3 -m pytest -q tests/test_examples.py
for tool in memcheck racecheck initcheck; do
    for family in "" volta; do
        # the caching allocator would hide accesses between tensors of one block
        step "$tool$family" env VOLTA_FA_FAMILY=$family PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" \
            --error-exitcode 9 --kernel-name-exclude kernel_substring=at:: python3 tools/gpu/sanitizer_cases.py
    done
done
exit $failed
