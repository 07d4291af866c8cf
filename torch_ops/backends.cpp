// CPU and CUDA kernels of fwd and bwd: both call Rust, which chooses a backend by q's device.

#include "ops.h"
#include "registration.h"
#include "rust.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/randint.h>

#include <limits>

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

FwdResult fwd(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_OPTION_PARAMETERS(int64_t),
              std::optional<at::Generator> generator) {
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
