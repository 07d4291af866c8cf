// Autocast: casts q, k and v to the region's dtype, like PyTorch's own attention. Casts a bias and sinks only if they are
// fp16 or bf16, because fp32 ones go with every q.

#include "ops.h"
#include "registration.h"

#include <ATen/autocast_mode.h>

namespace volta_fa {
namespace {

template <c10::DeviceType device>
FwdResult fwd(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_OPTION_PARAMETERS(c10::SymInt),
              std::optional<at::Generator> generator) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const auto dtype = at::autocast::get_autocast_dtype(device);
    const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(dtype, t, device); };
    const auto cast_low_precision = [&](const OptionalTensor& t) {
        const bool lower = t && t->defined() && (t->scalar_type() == at::kHalf || t->scalar_type() == at::kBFloat16);
        return lower ? OptionalTensor(cast(*t)) : t;
    };
    Options<c10::SymInt> options{VOLTA_FA_OPTION_ARGUMENTS};
    for (OptionalTensor* t : {VOLTA_FA_DIFFERENTIABLE_MEMBERS(options)}) *t = cast_low_precision(*t);
    return fwd_op().call(cast(q), cast(k), cast(v), VOLTA_FA_OPTION_MEMBERS(options), std::move(generator));
}

}  // namespace

// A quantized cache has elements of one byte, whose type is not that of q.
Tensor cast_to_cache_dtype(const Tensor& cache, const Tensor& t, c10::DeviceType device) {
    const bool quantized = cache.element_size() == 1;
    return at::autocast::cached_cast(quantized ? at::autocast::get_autocast_dtype(device) : cache.scalar_type(), t, device);
}

VOLTA_FA_LIBRARY_IMPL(AutocastCPU, m) { m.impl("fwd", fwd<c10::DeviceType::CPU>); }
VOLTA_FA_LIBRARY_IMPL(AutocastCUDA, m) { m.impl("fwd", fwd<c10::DeviceType::CUDA>); }

}  // namespace volta_fa
