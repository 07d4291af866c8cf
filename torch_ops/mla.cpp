// Registers volta_fa::fwd_mla.

#include "ops.h"
#include "registration.h"
#include "rust.h"

#include <ATen/DeviceGuard.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

namespace volta_fa {
namespace {

using Result = std::tuple<Tensor, Tensor>;  // out, softmax_lse

Result run(const Tensor& q, const Tensor& latent_cache, VOLTA_FA_MLA_OPTION_PARAMETERS(int64_t)) {
    const c10::OptionalDeviceGuard guard(at::device_of(q));
    const MlaArgs args{handle(q), handle(latent_cache), mla_option_args<int64_t>(VOLTA_FA_MLA_OPTION_ARGUMENTS), current_stream(q)};
    std::array<void*, 2> outputs{};
    check(volta_fa_fwd_mla(&args, outputs.data()));
    return {take_tensor(outputs[0]), take_tensor(outputs[1])};
}

Result meta(const Tensor& q, const Tensor& latent_cache, VOLTA_FA_MLA_OPTION_PARAMETERS(c10::SymInt)) {
    const MlaArgs args{handle(q), handle(latent_cache), mla_option_args<c10::SymInt>(VOLTA_FA_MLA_OPTION_ARGUMENTS),
                       /*stream=*/nullptr};
    check(volta_fa_check_fwd_mla(&args));
    c10::SymDimVector out(q.sym_sizes().begin(), q.sym_sizes().end());
    out.back() = c10::SymInt(volta_fa_latent_values());
    const auto nheads = q.sym_size(-2), rows = q.sym_size(-3);
    const auto lse = q.dim() == 3 ? c10::SymDimVector{nheads, rows} : c10::SymDimVector{q.sym_size(0), nheads, rows};
    return {at::empty_symint(out, q.options()), at::empty_symint(lse, q.options().dtype(at::kFloat))};
}

using Op = Result(const Tensor&, const Tensor&, VOLTA_FA_MLA_OPTION_PARAMETERS(c10::SymInt));

template <c10::DeviceType device>
Result autocast(const Tensor& q, const Tensor& latent_cache, VOLTA_FA_MLA_OPTION_PARAMETERS(c10::SymInt)) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::fwd_mla", "").typed<Op>();
    return op.call(cast_to_cache_dtype(latent_cache, q, device), latent_cache, VOLTA_FA_MLA_OPTION_ARGUMENTS);
}

}  // namespace

VOLTA_FA_LIBRARY_FRAGMENT(m) {
    m.def("fwd_mla(Tensor q, Tensor latent_cache, *, " VOLTA_FA_MLA_OPTION_SCHEMA ") -> (Tensor out, Tensor softmax_lse)",
          {at::Tag::pt2_compliant_tag});
}

VOLTA_FA_LIBRARY_IMPL(CPU, m) { m.impl("fwd_mla", run); }
VOLTA_FA_LIBRARY_IMPL(CUDA, m) { m.impl("fwd_mla", run); }
VOLTA_FA_LIBRARY_IMPL(Meta, m) { m.impl("fwd_mla", meta); }
VOLTA_FA_LIBRARY_IMPL(AutocastCPU, m) { m.impl("fwd_mla", autocast<c10::DeviceType::CPU>); }
VOLTA_FA_LIBRARY_IMPL(AutocastCUDA, m) { m.impl("fwd_mla", autocast<c10::DeviceType::CUDA>); }
VOLTA_FA_LIBRARY_IMPL(Autograd, m) { m.impl("fwd_mla", torch::autograd::autogradNotImplementedFallback()); }

}  // namespace volta_fa
