// CPU and CUDA kernels of fwd and bwd: both call Rust, which chooses a backend by q's device.

#include "ops.h"
#include "registration.h"
#include "rust.h"

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

// Draws seed and offset of one call from PyTorch's generator with PyTorch's own kernel. So they follow manual_seed, and each replay
// of a CUDA graph draws new ones. Returns no elements without dropout. (Rust rejects invalid probabilities.)
Tensor draw_rng_state(const Tensor& q, double dropout_p, std::optional<at::Generator> generator) {
    if (!q.defined()) return {};  // Rust rejects None
    if (!(dropout_p > 0.0 && dropout_p < 1.0)) return no_elements(q, at::kLong);
    return at::randint(std::numeric_limits<int64_t>::max(), {2}, std::move(generator), q.options().dtype(at::kLong));
}

// Warns once in a process if q and k are probably (batch, nheads, seqlen, headdim): a valid call, with a result that is not meant.
// Grouped heads do not count: models with these have few KV heads, and short prompts.
void warn_if_heads_first(const Tensor& q, const Tensor& k) {
    constexpr int64_t kUsualHeads = 64;  // most models have at most as many, so more of them than tokens are probably tokens
    // A mistake shows in a process' first calls, and later ones must not pay for the look.
    static std::atomic<int> calls_left{100};
    if (calls_left.load(std::memory_order_relaxed) <= 0 || !q.defined() || !k.defined() || q.dim() != 4 || k.dim() != 4) return;
    calls_left--;
    const int64_t tokens = q.size(1), heads = q.size(2), keys = k.size(1), key_heads = k.size(2);
    if (heads <= std::max(kUsualHeads, tokens) || key_heads <= std::max(kUsualHeads, keys)) return;
    if (keys == 0 || tokens % keys != 0) return;  // not the numbers of heads
    calls_left = 0;
    const char* variable = std::getenv("VOLTA_FA_WARN_LAYOUT");
    if (variable && std::string_view(variable) == "0") return;
    TORCH_WARN(
        "volta_fa: q: got shape ", q.sizes(), ": ", heads, " heads and ", tokens,
        " tokens, expected (batch, seqlen, nheads, headdim): if heads come first, pass q.transpose(1, 2), and k and v likewise. ",
        "If not, set VOLTA_FA_WARN_LAYOUT=0");
}

FwdResult fwd(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_OPTION_PARAMETERS(int64_t),
              std::optional<at::Generator> generator) {
    warn_if_heads_first(q, k);
    const c10::OptionalDeviceGuard guard(at::device_of(q));
    const OptionalTensor rng_state = draw_rng_state(q, dropout_p, std::move(generator));
    auto args = attention_args<int64_t>(q, k, v, rng_state, VOLTA_FA_OPTION_ARGUMENTS);
    args.stream = current_stream(q);
    std::array<void*, 2> outputs{};
    check(volta_fa_fwd(&args, outputs.data()));
    return {take_tensor(outputs[0]), take_tensor(outputs[1]), *rng_state};
}

BwdResult bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& softmax_lse,
              const OptionalTensor& rng_state, VOLTA_FA_OPTION_PARAMETERS(int64_t), bool attn_bias_requires_grad,
              const OptionalTensor& dlse) {
    const c10::OptionalDeviceGuard guard(at::device_of(q));
    auto args = backward_args<int64_t>(dout, q, k, v, out, softmax_lse, rng_state, VOLTA_FA_OPTION_ARGUMENTS,
                                       attn_bias_requires_grad, dlse);
    args.attention.stream = current_stream(q);
    std::array<void*, 5> outputs{};
    check(volta_fa_bwd(&args, outputs.data()));
    const auto gradient = [&](size_t i) { return outputs[i] ? take_tensor(outputs[i]) : no_elements(q, q.scalar_type()); };
    return {gradient(0), gradient(1), gradient(2), gradient(3), gradient(4)};
}

}  // namespace

VOLTA_FA_LIBRARY_IMPL(CPU, m) {
    m.impl("fwd", fwd);
    m.impl("bwd", bwd);
}

VOLTA_FA_LIBRARY_IMPL(CUDA, m) {
    m.impl("fwd", fwd);
    m.impl("bwd", bwd);
}

}  // namespace volta_fa
