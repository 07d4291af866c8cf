// Gradients: fwd's derivative is bwd; bwd has none.

#include "ops.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace volta_fa {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool needs_gradient(const OptionalTensor &t) { return t && t->defined() && t->requires_grad(); }

struct Attention : torch::autograd::Function<Attention> {
    static variable_list forward(AutogradContext *ctx, const Tensor &q, const Tensor &k, const Tensor &v,
                                 VOLTA_FA_OPTION_PARAMETERS(c10::SymInt), std::optional<at::Generator> generator) {
        at::AutoDispatchBelowADInplaceOrView guard;
        auto [out, softmax_lse, rng_state] = fwd_op().call(q, k, v, VOLTA_FA_OPTION_ARGUMENTS, std::move(generator));
        const auto tensor = [](const OptionalTensor &t) { return t.value_or(Tensor()); };
        ctx->save_for_backward({q, k, v, out, softmax_lse, rng_state, tensor(cu_seqlens_q), tensor(cu_seqlens_k),
                                tensor(seqused_k), tensor(attn_bias), tensor(alibi_slopes), tensor(sinks)});
        auto &saved = ctx->saved_data;
        saved["max_seqlen_q"] = max_seqlen_q;
        saved["max_seqlen_k"] = max_seqlen_k;
        saved["dropout_p"] = dropout_p;
        saved["softmax_scale"] = softmax_scale;
        saved["is_causal"] = is_causal;
        saved["window_left"] = window_left;
        saved["window_right"] = window_right;
        saved["softcap"] = softcap;
        saved["deterministic"] = deterministic;
        saved["attn_bias_requires_grad"] = needs_gradient(attn_bias);
        ctx->mark_non_differentiable({softmax_lse, rng_state});
        // gradients of the non-differentiable outputs arrive undefined, not as zeros to allocate
        ctx->set_materialize_grads(false);
        return {out, softmax_lse, rng_state};
    }

    static variable_list backward(AutogradContext *ctx, const variable_list &grads) {
        constexpr size_t inputs = 19;  // q, k, v, the 15 options and the generator
        constexpr size_t attn_bias_input = 8, sinks_input = 10;
        variable_list result(inputs);
        const Tensor &dout = grads[0];
        if (!dout.defined()) return result;
        const auto t = ctx->get_saved_variables();
        const auto optional = [&](size_t i) { return t[i].defined() ? OptionalTensor(t[i]) : std::nullopt; };
        auto &saved = ctx->saved_data;
        const auto [dq, dk, dv, dattn_bias, dsinks] = bwd_op().call(
            dout, t[0], t[1], t[2], t[3], t[4], t[5], optional(6), optional(7), saved["max_seqlen_q"].to<std::optional<c10::SymInt>>(),
            saved["max_seqlen_k"].to<std::optional<c10::SymInt>>(), optional(8), optional(9), optional(10), optional(11),
            saved["dropout_p"].toDouble(), saved["softmax_scale"].to<std::optional<double>>(), saved["is_causal"].toBool(),
            saved["window_left"].toSymInt(), saved["window_right"].toSymInt(), saved["softcap"].toDouble(),
            saved["deterministic"].toBool() || at::globalContext().deterministicAlgorithms(), saved["attn_bias_requires_grad"].toBool());
        result[0] = dq;
        result[1] = dk;
        result[2] = dv;
        if (saved["attn_bias_requires_grad"].toBool()) result[attn_bias_input] = dattn_bias;
        if (t[11].defined()) result[sinks_input] = dsinks;
        return result;
    }
};

FwdResult fwd(const Tensor &q, const Tensor &k, const Tensor &v, VOLTA_FA_OPTION_PARAMETERS(c10::SymInt),
              std::optional<at::Generator> generator) {
    const auto has_tangent = [](const OptionalTensor &t) { return t && t->defined() && t->_fw_grad(/*level=*/0).defined(); };
    TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(q) || has_tangent(k) || has_tangent(v) || has_tangent(attn_bias) || has_tangent(sinks)),
                                "volta_fa::fwd: forward-mode derivatives (torch.func.jvp) are not implemented");
    if (!at::GradMode::is_enabled() ||
        !(q.requires_grad() || k.requires_grad() || v.requires_grad() || needs_gradient(attn_bias) || needs_gradient(sinks))) {
        // inference: no graph node to build
        at::AutoDispatchBelowADInplaceOrView guard;
        return fwd_op().call(q, k, v, VOLTA_FA_OPTION_ARGUMENTS, std::move(generator));
    }
    auto outputs = Attention::apply(q, k, v, VOLTA_FA_OPTION_ARGUMENTS, std::move(generator));
    return {outputs[0], outputs[1], outputs[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(volta_fa, Autograd, m) {
    m.impl("fwd", fwd);
    // a second derivative raises and names the op
    m.impl("bwd", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace volta_fa
