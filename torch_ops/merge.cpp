// Registers volta_fa::merge_attention_states and its in-place form.

#include "registration.h"
#include "rust.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

namespace volta_fa {
namespace {

using States = std::tuple<Tensor, Tensor>;  // out, softmax_lse

MergeArgs merge_args(const Tensor& out_a, const Tensor& softmax_lse_a, const Tensor& out_b, const Tensor& softmax_lse_b) {
    return {handle(out_a), handle(softmax_lse_a), handle(out_b), handle(softmax_lse_b), /*stream=*/nullptr};
}

States merge(const Tensor& out_a, const Tensor& softmax_lse_a, const Tensor& out_b, const Tensor& softmax_lse_b) {
    const c10::OptionalDeviceGuard guard(at::device_of(out_a));
    auto args = merge_args(out_a, softmax_lse_a, out_b, softmax_lse_b);
    args.stream = current_stream(out_a);
    std::array<void*, 2> outputs{};
    check(volta_fa_merge(&args, outputs.data()));
    return {take_tensor(outputs[0]), take_tensor(outputs[1])};
}

void merge_(const Tensor& out_a, const Tensor& softmax_lse_a, const Tensor& out_b, const Tensor& softmax_lse_b) {
    const c10::OptionalDeviceGuard guard(at::device_of(out_a));
    auto args = merge_args(out_a, softmax_lse_a, out_b, softmax_lse_b);
    args.stream = current_stream(out_a);
    check(volta_fa_merge_in_place(&args));
}

States meta(const Tensor& out_a, const Tensor& softmax_lse_a, const Tensor& out_b, const Tensor& softmax_lse_b) {
    const auto args = merge_args(out_a, softmax_lse_a, out_b, softmax_lse_b);
    check(volta_fa_check_merge(&args, /*in_place=*/false));
    return {at::empty_symint(out_a.sym_sizes(), out_a.options()),
            at::empty_symint(softmax_lse_a.sym_sizes(), softmax_lse_a.options())};
}

void meta_(const Tensor& out_a, const Tensor& softmax_lse_a, const Tensor& out_b, const Tensor& softmax_lse_b) {
    const auto args = merge_args(out_a, softmax_lse_a, out_b, softmax_lse_b);
    check(volta_fa_check_merge(&args, /*in_place=*/true));
}

}  // namespace

VOLTA_FA_LIBRARY_FRAGMENT(m) {
    m.def(
        "merge_attention_states(Tensor out_a, Tensor softmax_lse_a, Tensor out_b, Tensor softmax_lse_b) "
        "-> (Tensor out, Tensor softmax_lse)",
        {at::Tag::pt2_compliant_tag});
    m.def("merge_attention_states_(Tensor(a!) out_a, Tensor(b!) softmax_lse_a, Tensor out_b, Tensor softmax_lse_b) -> ()",
          {at::Tag::pt2_compliant_tag});
}

VOLTA_FA_LIBRARY_IMPL(CPU, m) {
    m.impl("merge_attention_states", merge);
    m.impl("merge_attention_states_", merge_);
}

VOLTA_FA_LIBRARY_IMPL(CUDA, m) {
    m.impl("merge_attention_states", merge);
    m.impl("merge_attention_states_", merge_);
}

VOLTA_FA_LIBRARY_IMPL(Meta, m) {
    m.impl("merge_attention_states", meta);
    m.impl("merge_attention_states_", meta_);
}

VOLTA_FA_LIBRARY_IMPL(Autograd, m) {
    m.impl("merge_attention_states", torch::autograd::autogradNotImplementedFallback());
    m.impl("merge_attention_states_", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace volta_fa
