// Registers volta_fa::fwd_sparse_mla.

#include "ops.h"
#include "registration.h"
#include "rust.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

namespace volta_fa {
namespace {

using Result = std::tuple<Tensor, Tensor, Tensor>;  // out, softmax_lse, max_logits

SparseMlaArgs sparse_args(const Tensor& q, const Tensor& cache, const Tensor& indices, const OptionalTensor& topk_length,
                          const OptionalTensor& extra_cache, const OptionalTensor& extra_indices,
                          const OptionalTensor& extra_topk_length, const OptionalTensor& sinks,
                          const std::optional<double>& softmax_scale, bool fp16_positions) {
    return {handle(q),
            handle(cache),
            handle(indices),
            handle(topk_length),
            handle(extra_cache),
            handle(extra_indices),
            handle(extra_topk_length),
            handle(sinks),
            softmax_scale ? &*softmax_scale : nullptr,
            fp16_positions,
            /*stream=*/nullptr};
}

Result run(const Tensor& q, const Tensor& cache, const Tensor& indices, const OptionalTensor& topk_length,
           const OptionalTensor& extra_cache, const OptionalTensor& extra_indices, const OptionalTensor& extra_topk_length,
           const OptionalTensor& sinks, std::optional<double> softmax_scale, bool fp16_positions) {
    const c10::OptionalDeviceGuard guard(at::device_of(q));
    auto args = sparse_args(q, cache, indices, topk_length, extra_cache, extra_indices, extra_topk_length, sinks, softmax_scale,
                            fp16_positions);
    args.stream = current_stream(q);
    std::array<void*, 3> outputs{};
    check(volta_fa_fwd_sparse_mla(&args, outputs.data()));
    const auto of_heads = [](void* rows) { return take_tensor(rows).t(); };
    return {take_tensor(outputs[0]), of_heads(outputs[1]), of_heads(outputs[2])};
}

Result meta(const Tensor& q, const Tensor& cache, const Tensor& indices, const OptionalTensor& topk_length,
            const OptionalTensor& extra_cache, const OptionalTensor& extra_indices, const OptionalTensor& extra_topk_length,
            const OptionalTensor& sinks, std::optional<double> softmax_scale, bool fp16_positions) {
    const auto args = sparse_args(q, cache, indices, topk_length, extra_cache, extra_indices, extra_topk_length, sinks,
                                  softmax_scale, fp16_positions);
    check(volta_fa_check_fwd_sparse_mla(&args));
    c10::SymDimVector out(q.sym_sizes().begin(), q.sym_sizes().end());
    out.back() = c10::SymInt(volta_fa_latent_values());
    const auto of_heads = [&] { return at::empty_symint({q.sym_size(0), q.sym_size(1)}, q.options().dtype(at::kFloat)).t(); };
    return {at::empty_symint(out, q.options()), of_heads(), of_heads()};
}

}  // namespace

VOLTA_FA_LIBRARY_FRAGMENT(m) {
    m.def(
        "fwd_sparse_mla(Tensor q, Tensor cache, Tensor indices, *, Tensor? topk_length=None, Tensor? extra_cache=None, "
        "Tensor? extra_indices=None, Tensor? extra_topk_length=None, Tensor? sinks=None, float? softmax_scale=None, "
        "bool fp16_positions=False) -> (Tensor out, Tensor softmax_lse, Tensor max_logits)",
        {at::Tag::pt2_compliant_tag});
}

VOLTA_FA_LIBRARY_IMPL(CPU, m) { m.impl("fwd_sparse_mla", run); }
VOLTA_FA_LIBRARY_IMPL(CUDA, m) { m.impl("fwd_sparse_mla", run); }
VOLTA_FA_LIBRARY_IMPL(Meta, m) { m.impl("fwd_sparse_mla", meta); }
VOLTA_FA_LIBRARY_IMPL(Autograd, m) { m.impl("fwd_sparse_mla", torch::autograd::autogradNotImplementedFallback()); }

}  // namespace volta_fa
