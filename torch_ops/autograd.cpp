// Autograd: the derivative of fwd is bwd. bwd has no derivative.

#include "ops.h"
#include "registration.h"
#include "subclass.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

namespace volta_fa {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const Tensor* given(const Tensor& t) { return t.defined() ? &t : nullptr; }
const Tensor* given(const OptionalTensor& t) { return t ? given(*t) : nullptr; }

template <class... Tensors>
bool any_needs_gradient(const Tensors&... tensors) {
    return ((given(tensors) && given(tensors)->requires_grad()) || ...);
}

template <class... Tensors>
bool any_has_tangent(const Tensors&... tensors) {
    return ((given(tensors) && given(tensors)->_fw_grad(/*level=*/0).defined()) || ...);
}

struct Attention : torch::autograd::Function<Attention> {
    static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                                 VOLTA_FA_OPTION_PARAMETERS(c10::SymInt), std::optional<at::Generator> generator) {
        at::AutoDispatchBelowADInplaceOrView guard;
        auto [out, softmax_lse, rng_state] = fwd_op().call(q, k, v, VOLTA_FA_OPTION_ARGUMENTS, std::move(generator));
        // in the order of SavedTensor
        const OptionalTensor saved[] = {q, k, v, out, softmax_lse, rng_state, VOLTA_FA_TENSOR_OPTIONS};
        static_assert(std::size(saved) == SavedTensor::count);
        variable_list tensors;
        for (const auto& t : saved) tensors.push_back(t.value_or(Tensor()));
        ctx->save_for_backward(std::move(tensors));
        save_options(ctx->saved_data, VOLTA_FA_OPTION_ARGUMENTS);
        ctx->saved_data["attn_bias_requires_grad"] = any_needs_gradient(attn_bias);
        ctx->mark_non_differentiable({rng_state});
        // gradients of outputs without a use stay undefined, to save allocating zeros and the work for softmax_lse's
        ctx->set_materialize_grads(false);
        return {out, softmax_lse, rng_state};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        variable_list result(FwdInput::count);
        const Tensor& dlse = grads[1];
        if (!grads[0].defined() && !dlse.defined()) return result;
        const auto t = ctx->get_saved_variables();
        auto options = saved_options(ctx->saved_data, t);
        options.deterministic = options.deterministic || at::globalContext().deterministicAlgorithms();
        const bool attn_bias_requires_grad = ctx->saved_data["attn_bias_requires_grad"].toBool();
        // Without create_graph, skips bwd's own Autograd kernel, because that boxes every argument.
        std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
        if (!at::GradMode::is_enabled()) guard.emplace();
        const Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(t[SavedTensor::out]);
        const auto [dq, dk, dv, dattn_bias, dsinks] = bwd_op().call(
            dout, t[SavedTensor::q], t[SavedTensor::k], t[SavedTensor::v], t[SavedTensor::out], t[SavedTensor::softmax_lse],
            optional(t[SavedTensor::rng_state]), VOLTA_FA_OPTION_MEMBERS(options), attn_bias_requires_grad, optional(dlse));
        result[FwdInput::q] = dq;
        result[FwdInput::k] = dk;
        result[FwdInput::v] = dv;
        if (attn_bias_requires_grad) result[FwdInput::attn_bias] = dattn_bias;
        if (options.sinks) result[FwdInput::sinks] = dsinks;
        return result;
    }
};

FwdResult fwd(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_OPTION_PARAMETERS(c10::SymInt),
              std::optional<at::Generator> generator) {
    TORCH_CHECK_NOT_IMPLEMENTED(!any_has_tangent(q, k, v, VOLTA_FA_DIFFERENTIABLE_OPTIONS),
                                "volta_fa::fwd: forward-mode derivatives (torch.func.jvp) are not implemented");
    if (is_subclass(q)) has_rules(q);  // loads the rules
    const bool is_complete = q.defined() && k.defined() && v.defined();  // Rust rejects None
    if (!is_complete || !at::GradMode::is_enabled() || !any_needs_gradient(q, k, v, VOLTA_FA_DIFFERENTIABLE_OPTIONS)) {
        // builds no graph node
        at::AutoDispatchBelowADInplaceOrView guard;
        return fwd_op().call(q, k, v, VOLTA_FA_OPTION_ARGUMENTS, std::move(generator));
    }
    auto outputs = Attention::apply(q, k, v, VOLTA_FA_OPTION_ARGUMENTS, std::move(generator));
    return {outputs[0], outputs[1], outputs[2]};
}

}  // namespace

VOLTA_FA_LIBRARY_IMPL(Autograd, m) {
    m.impl("fwd", fwd);
    // a second derivative raises and names the op
    m.impl("bwd", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace volta_fa
