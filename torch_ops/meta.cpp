// Shapes and dtypes without data: what torch.compile and fake tensors see. SymInt throughout.

#include "ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace volta_fa {
namespace {

Tensor contiguous_like(const Tensor &t) { return at::empty_symint(t.sym_sizes(), t.options()); }

void check_rank(const char *name, const Tensor &t) {
    TORCH_CHECK_VALUE(t.dim() == 4, "volta_fa: ", name, ": got a tensor of rank ", t.dim(),
                      ", expected rank 4, (batch, seqlen, nheads, headdim)");
}

FwdResult fwd(const Tensor &q, const Tensor &k, const Tensor &v, VOLTA_FA_OPTION_PARAMETERS(c10::SymInt),
              std::optional<at::Generator>) {
    check_rank("q", q);
    check_rank("k", k);
    check_rank("v", v);
    const auto batch = q.sym_size(0), seqlen_q = q.sym_size(1), nheads = q.sym_size(2);
    return {at::empty_symint({batch, seqlen_q, nheads, v.sym_size(3)}, q.options()),
            at::empty_symint({batch, nheads, seqlen_q}, q.options().dtype(at::kFloat)),
            at::empty_symint({c10::SymInt(0)}, q.options().dtype(at::kLong))};
}

BwdResult bwd(const Tensor &, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &, const Tensor &,
              const OptionalTensor &, VOLTA_FA_OPTION_PARAMETERS(c10::SymInt)) {
    const auto absent = [&] { return at::empty_symint({c10::SymInt(0)}, q.options()); };
    return {contiguous_like(q), contiguous_like(k), contiguous_like(v), absent(), absent()};
}

}  // namespace

TORCH_LIBRARY_IMPL(volta_fa, Meta, m) {
    m.impl("fwd", fwd);
    m.impl("bwd", bwd);
}

}  // namespace volta_fa
