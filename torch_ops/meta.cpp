// Meta kernels of fwd and bwd: return shapes and dtypes for torch.compile and fake tensors. Sizes may be symbolic; Rust checks
// known ones.

#include "ops.h"
#include "registration.h"
#include "rust.h"

#include <ATen/ops/empty.h>

namespace volta_fa {
namespace {

Tensor contiguous_like(const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); }

FwdResult fwd(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_OPTION_PARAMETERS(c10::SymInt),
              std::optional<at::Generator>) {
    const auto args = attention_args<c10::SymInt>(q, k, v, /*rng_state=*/std::nullopt, VOLTA_FA_OPTION_ARGUMENTS);
    check(volta_fa_check_fwd(&args));
    c10::SymDimVector out(q.sym_sizes().begin(), q.sym_sizes().end());
    out.back() = v.sym_sizes().back();
    const auto nheads = q.sym_size(-2), rows = q.sym_size(-3);
    const auto lse = q.dim() == 3 ? c10::SymDimVector{nheads, rows} : c10::SymDimVector{q.sym_size(0), nheads, rows};
    return {at::empty_symint(out, q.options()), at::empty_symint(lse, q.options().dtype(at::kFloat)),
            at::empty_symint({c10::SymInt(dropout_p > 0.0 ? 2 : 0)}, q.options().dtype(at::kLong))};
}

BwdResult bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& softmax_lse,
              const OptionalTensor& rng_state, VOLTA_FA_OPTION_PARAMETERS(c10::SymInt), bool attn_bias_requires_grad,
              const OptionalTensor& dlse) {
    const auto args = backward_args<c10::SymInt>(dout, q, k, v, out, softmax_lse, rng_state, VOLTA_FA_OPTION_ARGUMENTS,
                                                 attn_bias_requires_grad, dlse);
    check(volta_fa_check_bwd(&args));
    const auto like = [&](bool there, const OptionalTensor& t) {
        return there && t && t->defined() ? contiguous_like(*t) : at::empty_symint({c10::SymInt(0)}, q.options());
    };
    return {contiguous_like(q), contiguous_like(k), contiguous_like(v), like(attn_bias_requires_grad, attn_bias),
            like(true, sinks)};
}

}  // namespace

VOLTA_FA_LIBRARY_IMPL(Meta, m) {
    m.impl("fwd", fwd);
    m.impl("bwd", bwd);
}

}  // namespace volta_fa
