// What the registrations share: the options of both ops, written once, and typed handles to the ops.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <tuple>

namespace volta_fa {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using FwdResult = std::tuple<Tensor, Tensor, Tensor>;                  // out, softmax_lse, rng_state
using BwdResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // dq, dk, dv, dattn_bias, dsinks

// The keyword options that fwd and bwd share, as C++ parameters, as arguments, and in the schema.
// Int is c10::SymInt above the backends and int64_t in them.
#define VOLTA_FA_OPTION_PARAMETERS(Int)                                                                        \
    const OptionalTensor &cu_seqlens_q, const OptionalTensor &cu_seqlens_k, std::optional<Int> max_seqlen_q,   \
        std::optional<Int> max_seqlen_k, const OptionalTensor &seqused_k, const OptionalTensor &attn_bias,     \
        const OptionalTensor &alibi_slopes, const OptionalTensor &sinks, double dropout_p,                     \
        std::optional<double> softmax_scale, bool is_causal, Int window_left, Int window_right, double softcap, \
        bool deterministic

#define VOLTA_FA_OPTION_ARGUMENTS                                                                             \
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, attn_bias, alibi_slopes, sinks, dropout_p, \
        softmax_scale, is_causal, window_left, window_right, softcap, deterministic

#define VOLTA_FA_OPTION_SCHEMA                                                                        \
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "                                          \
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? seqused_k=None, "                  \
    "Tensor? attn_bias=None, Tensor? alibi_slopes=None, Tensor? sinks=None, float dropout_p=0.0, "    \
    "float? softmax_scale=None, bool is_causal=False, SymInt window_left=-1, SymInt window_right=-1, " \
    "float softcap=0.0, bool deterministic=False"

using FwdOp = FwdResult(const Tensor &q, const Tensor &k, const Tensor &v, VOLTA_FA_OPTION_PARAMETERS(c10::SymInt),
                        std::optional<at::Generator> generator);
using BwdOp = BwdResult(const Tensor &dout, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &out,
                        const Tensor &softmax_lse, const OptionalTensor &rng_state,
                        VOLTA_FA_OPTION_PARAMETERS(c10::SymInt), bool attn_bias_requires_grad);

inline const c10::TypedOperatorHandle<FwdOp> &fwd_op() {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::fwd", "").typed<FwdOp>();
    return op;
}

inline const c10::TypedOperatorHandle<BwdOp> &bwd_op() {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::bwd", "").typed<BwdOp>();
    return op;
}

}  // namespace volta_fa
