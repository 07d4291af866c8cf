// Shapes and dtypes without data: what torch.compile and fake tensors see. SymInt throughout.

#include "ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace volta_fa {
namespace {

Tensor contiguous_like(const Tensor &t) { return at::empty_symint(t.sym_sizes(), t.options()); }

// (batch, seqlen, nheads, headdim), or with cu_seqlens (total, nheads, headdim).
void check_rank(const char *name, const Tensor &t, bool packed) {
    TORCH_CHECK_VALUE(t.dim() == (packed ? 3 : 4), "volta_fa: ", name, ": got a tensor of rank ", t.dim(), ", expected rank ",
                      packed ? "3, (total, nheads, headdim), with cu_seqlens_q" : "4, (batch, seqlen, nheads, headdim)");
}

FwdResult fwd(const Tensor &q, const Tensor &k, const Tensor &v, VOLTA_FA_OPTION_PARAMETERS(c10::SymInt),
              std::optional<at::Generator>) {
    const bool packed = cu_seqlens_q && cu_seqlens_q->defined();
    check_rank("q", q, packed);
    check_rank("k", k, packed);
    check_rank("v", v, packed);
    c10::SymDimVector out(q.sym_sizes().begin(), q.sym_sizes().end());
    out.back() = v.sym_sizes().back();
    const auto nheads = q.sym_size(-2), rows = q.sym_size(-3);
    const auto lse = packed ? c10::SymDimVector{nheads, rows} : c10::SymDimVector{q.sym_size(0), nheads, rows};
    return {at::empty_symint(out, q.options()), at::empty_symint(lse, q.options().dtype(at::kFloat)),
            at::empty_symint({c10::SymInt(dropout_p > 0.0 ? 2 : 0)}, q.options().dtype(at::kLong))};
}

BwdResult bwd(const Tensor &, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &, const Tensor &,
              const OptionalTensor &, VOLTA_FA_OPTION_PARAMETERS(c10::SymInt), bool attn_bias_requires_grad) {
    const auto optional = [&](bool there, const OptionalTensor &t) {
        return there && t && t->defined() ? contiguous_like(*t) : at::empty_symint({c10::SymInt(0)}, q.options());
    };
    return {contiguous_like(q), contiguous_like(k), contiguous_like(v), optional(attn_bias_requires_grad, attn_bias),
            optional(true, sinks)};
}

}  // namespace

TORCH_LIBRARY_IMPL(volta_fa, Meta, m) {
    m.impl("fwd", fwd);
    m.impl("bwd", bwd);
}

}  // namespace volta_fa
