// CPU and CUDA: both hand the call to Rust, which looks at the tensors' device itself.

#include "ops.h"
#include "rust.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <limits>

namespace volta_fa {
namespace {

void *handle(const Tensor &t) { return const_cast<Tensor *>(&t); }
void *handle(const OptionalTensor &t) { return t && t->defined() ? handle(*t) : nullptr; }

void *current_stream(const Tensor &t) {
    if (!t.is_cuda()) return nullptr;
    return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(t.device()).native_handle();
}

AttentionArgs arguments(const Tensor &q, const Tensor &k, const Tensor &v, VOLTA_FA_OPTION_PARAMETERS(int64_t)) {
    constexpr int64_t none = std::numeric_limits<int64_t>::min();
    AttentionArgs a{};
    a.q = handle(q);
    a.k = handle(k);
    a.v = handle(v);
    a.cu_seqlens_q = handle(cu_seqlens_q);
    a.cu_seqlens_k = handle(cu_seqlens_k);
    a.seqused_k = handle(seqused_k);
    a.attn_bias = handle(attn_bias);
    a.alibi_slopes = handle(alibi_slopes);
    a.sinks = handle(sinks);
    a.max_seqlen_q = max_seqlen_q.value_or(none);
    a.max_seqlen_k = max_seqlen_k.value_or(none);
    a.dropout_p = dropout_p;
    a.softmax_scale = softmax_scale.value_or(0.0);
    a.has_softmax_scale = softmax_scale.has_value();
    a.softcap = softcap;
    a.window_left = window_left;
    a.window_right = window_right;
    a.is_causal = is_causal;
    a.deterministic = deterministic;
    a.stream = current_stream(q);
    return a;
}

FwdResult fwd(const Tensor &q, const Tensor &k, const Tensor &v, VOLTA_FA_OPTION_PARAMETERS(int64_t),
              std::optional<at::Generator> /* generator: dropout is not implemented, Rust refuses dropout_p */) {
    const c10::DeviceGuard guard(q.device());
    const AttentionArgs args = arguments(q, k, v, VOLTA_FA_OPTION_ARGUMENTS);
    std::array<void *, 3> outputs{};
    check(volta_fa_fwd(&args, outputs.data()));
    return {take_tensor(outputs[0]), take_tensor(outputs[1]), take_tensor(outputs[2])};
}

BwdResult bwd(const Tensor &dout, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &out,
              const Tensor &softmax_lse, const OptionalTensor & /* rng_state */, VOLTA_FA_OPTION_PARAMETERS(int64_t)) {
    const c10::DeviceGuard guard(q.device());
    BackwardArgs args{};
    args.attention = arguments(q, k, v, VOLTA_FA_OPTION_ARGUMENTS);
    args.dout = handle(dout);
    args.out = handle(out);
    args.softmax_lse = handle(softmax_lse);
    std::array<void *, 5> outputs{};
    check(volta_fa_bwd(&args, outputs.data()));
    return {take_tensor(outputs[0]), take_tensor(outputs[1]), take_tensor(outputs[2]), take_tensor(outputs[3]),
            take_tensor(outputs[4])};
}

}  // namespace

TORCH_LIBRARY_IMPL(volta_fa, CPU, m) {
    m.impl("fwd", fwd);
    m.impl("bwd", bwd);
}

TORCH_LIBRARY_IMPL(volta_fa, CUDA, m) {
    m.impl("fwd", fwd);
    m.impl("bwd", bwd);
}

}  // namespace volta_fa
