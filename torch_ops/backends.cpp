// The kernels at the CPU and CUDA keys, for each operator (a row of src/operators.rs, by its number): `Compute` passes a call's
// arguments to Rust (volta_fa_call) and puts the results on PyTorch's stack. `Arguments` views them on the stack, `Values` is the
// array that Rust reads. Only fwd has a generator: for it, the kernel draws dropout's random state and checks the layout.

#include "operators.h"  // boxed: makes a kernel of an object that takes a call's stack; kMaxResults: 5

#include <ATen/DeviceGuard.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <string_view>

namespace volta_fa {
namespace {

// Returns a tensor without elements for an absent result, like at::empty, but without the cost of dispatcher and allocator.
Tensor no_elements(const Tensor& like, at::ScalarType dtype) {
    return at::for_blob(nullptr, {0}).options(like.options().dtype(dtype)).target_device(like.device()).make_tensor();
}

// Returns (seed, offset) of one call's dropout, int64 on q's device, from PyTorch's generator and kernel. So they follow
// manual_seed, and each replay of a CUDA graph draws new ones. No elements without dropout or for a probability that Rust rejects.
Tensor draw_rng_state(const Tensor& q, double dropout_p, std::optional<at::Generator> generator) {
    if (!q.defined()) return {};  // Rust rejects None
    if (!(dropout_p > 0.0 && dropout_p < 1.0)) return no_elements(q, at::kLong);
    return at::randint(std::numeric_limits<int64_t>::max(), {2}, std::move(generator), q.options().dtype(at::kLong));
}

// Warns once in a process if q and k are probably (batch, nheads, seqlen, headdim), as in PyTorch's attention: a valid call, which
// volta_fa reads as (batch, seqlen, nheads, headdim). Grouped heads do not count: a short prompt with few KV heads looks the same.
void warn_if_heads_first(const Tensor& q, const Tensor& k) {
    constexpr int64_t kUsualHeads = 64;  // most models have no more heads
    // A mistake shows in a process' first 100 calls. Later calls must not pay for the check.
    static std::atomic<int> calls_left{100};
    if (calls_left.load(std::memory_order_relaxed) <= 0 || !q.defined() || !k.defined() || q.dim() != 4 || k.dim() != 4) return;
    calls_left--;
    const int64_t tokens = q.size(1), heads = q.size(2), keys = k.size(1), key_heads = k.size(2);
    if (heads <= std::max(kUsualHeads, tokens) || key_heads <= std::max(kUsualHeads, keys)) return;
    if (keys == 0 || tokens % keys != 0) return;  // heads first, these were nheads and nheads_k, and nheads_k divides nheads
    calls_left = 0;
    const char* variable = std::getenv("VOLTA_FA_WARN_LAYOUT");
    if (variable && std::string_view(variable) == "0") return;
    TORCH_WARN("volta_fa: q: got shape ", q.sizes(), ": ", heads, " heads and ", tokens,
               " tokens, expected (batch, seqlen, nheads, headdim): if heads come first, pass q.transpose(1, 2), ",
               "k.transpose(1, 2) and v.transpose(1, 2). If not, set VOLTA_FA_WARN_LAYOUT=0");
}

// Calls Rust, which chooses its CPU backend or kernels by the tensors' device. In the generator's place Rust gets the random state.
struct Compute final : c10::OperatorKernel {
    explicit Compute(const Operator& op) : op(op), results(op.schema.returns().size()), generator(op.find("generator")) {
        if (generator) dropout_p = op.at("dropout_p");
    }

    void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) const {
        const Arguments arguments(op, *stack);
        const Tensor like = arguments.tensor(0);
        const c10::OptionalDeviceGuard guard(at::device_of(like));
        Values values(arguments, /*may_be_symbolic=*/false);
        Tensor rng_state;
        if (generator) {
            warn_if_heads_first(like, arguments.tensor(1));
            rng_state = draw_rng_state(like, arguments[dropout_p].toDouble(), arguments[*generator].toOptional<at::Generator>());
            if (rng_state.defined() && rng_state.numel() > 0) values.set(*generator, rng_state);
        }
        std::array<void*, kMaxResults> found{};  // at::Tensor* from new; null: an absent result
        check(volta_fa_call(op.number, values.data(), op.count(), current_stream(like), found.data()));
        torch::jit::drop(*stack, op.count());
        for (size_t i = 0; i < results - (generator ? 1 : 0); ++i) {  // fwd's last result, rng_state, is not Rust's
            stack->emplace_back(found[i] ? take_tensor(found[i]) : no_elements(like, like.scalar_type()));
        }
        if (generator) stack->emplace_back(std::move(rng_state));
    }

    const Operator& op;
    const size_t results;
    const std::optional<size_t> generator;  // index of the argument; only fwd has it
    size_t dropout_p = 0;  // index of the argument, if there is a generator
};

}  // namespace

torch::CppFunction backend_kernel(const Operator& op) { return boxed<Compute>(op); }

}  // namespace volta_fa
