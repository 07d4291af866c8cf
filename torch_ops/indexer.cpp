// Registers volta_fa::indexer_logits.

#include "arguments.h"
#include "registration.h"
#include "rust.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

namespace volta_fa {
namespace {

using OptionalSize = std::optional<c10::SymInt>;

IndexerArgs indexer_args(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& k_end,
                         const OptionalTensor& k_start, const OptionalTensor& k_scales, const OptionalTensor& block_table,
                         const OptionalSize& max_seqlen_k, bool clean_logits) {
    const auto [given, columns] = maybe(max_seqlen_k);
    return {handle(q),         handle(k),           handle(weights), handle(k_end), handle(k_start),
            handle(k_scales),  handle(block_table), given,           columns,       clean_logits,
            /*stream=*/nullptr};
}

Tensor run(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& k_end, const OptionalTensor& k_start,
           const OptionalTensor& k_scales, const OptionalTensor& block_table, OptionalSize max_seqlen_k, bool clean_logits) {
    const c10::OptionalDeviceGuard guard(at::device_of(q));
    auto args = indexer_args(q, k, weights, k_end, k_start, k_scales, block_table, max_seqlen_k, clean_logits);
    args.stream = current_stream(q);
    void* output = nullptr;
    check(volta_fa_indexer_logits(&args, &output));
    return take_tensor(output);
}

Tensor meta(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& k_end, const OptionalTensor& k_start,
            const OptionalTensor& k_scales, const OptionalTensor& block_table, OptionalSize max_seqlen_k, bool clean_logits) {
    const auto args = indexer_args(q, k, weights, k_end, k_start, k_scales, block_table, max_seqlen_k, clean_logits);
    check(volta_fa_check_indexer_logits(&args));
    const auto columns = max_seqlen_k ? *max_seqlen_k : k.sym_size(0);
    return at::empty_symint({q.sym_size(0), q.sym_size(1), columns}, q.options().dtype(at::kFloat));
}

}  // namespace

VOLTA_FA_LIBRARY_FRAGMENT(m) {
    m.def(
        "indexer_logits(Tensor q, Tensor k, Tensor weights, Tensor k_end, *, Tensor? k_start=None, Tensor? k_scales=None, "
        "Tensor? block_table=None, SymInt? max_seqlen_k=None, bool clean_logits=True) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

VOLTA_FA_LIBRARY_IMPL(CPU, m) { m.impl("indexer_logits", run); }
VOLTA_FA_LIBRARY_IMPL(CUDA, m) { m.impl("indexer_logits", run); }
VOLTA_FA_LIBRARY_IMPL(Meta, m) { m.impl("indexer_logits", meta); }
VOLTA_FA_LIBRARY_IMPL(Autograd, m) { m.impl("indexer_logits", torch::autograd::autogradNotImplementedFallback()); }

}  // namespace volta_fa
