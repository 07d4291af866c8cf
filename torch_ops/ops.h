// Types of the ops and typed handles to them, for all registrations.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <tuple>

#include "volta_fa_options.h"

namespace volta_fa {

using FwdResult = std::tuple<Tensor, Tensor, Tensor>;                  // out, softmax_lse, rng_state
using BwdResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // dq, dk, dv, dattn_bias, dsinks
using FastResult = std::tuple<Tensor, Tensor>;                                    // out, softmax_lse

using FwdOp = FwdResult(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_OPTION_PARAMETERS(c10::SymInt),
                        std::optional<at::Generator> generator);
using BwdOp = BwdResult(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& softmax_lse, const OptionalTensor& rng_state, VOLTA_FA_OPTION_PARAMETERS(c10::SymInt),
                        bool attn_bias_requires_grad, const OptionalTensor& dlse);
using FastOp = FastResult(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_FAST_OPTION_PARAMETERS(c10::SymInt));

inline const c10::TypedOperatorHandle<FwdOp>& fwd_op() {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::fwd", "").typed<FwdOp>();
    return op;
}

inline const c10::TypedOperatorHandle<FastOp>& fast_op() {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::fwd_fast", "").typed<FastOp>();
    return op;
}

// Casts `t` to the cache's dtype under autocast, because the cache is updated in place. With a quantized cache, uses the autocast
// dtype.
Tensor cast_to_cache_dtype(const Tensor& cache, const Tensor& t, c10::DeviceType device);

inline const c10::TypedOperatorHandle<BwdOp>& bwd_op() {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::bwd", "").typed<BwdOp>();
    return op;
}

}  // namespace volta_fa
