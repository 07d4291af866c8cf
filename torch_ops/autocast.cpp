// Kernels at the keys AutocastCPU and AutocastCUDA, which operators.cpp registers: they cast a call's tensors, then call again
// below autocast. An operator's row in src/operators.rs has an `Autocast`. Region: required tensors get the region's dtype. Cache:
// those other than caches get the cache's dtype, because it is updated in place. Keep: there is no kernel.

#include "operators.h"  // Operator: a row of that table; boxed: makes a kernel of an object that takes a call's stack

#include <ATen/autocast_mode.h>

namespace volta_fa {
namespace {

struct Cast final : c10::OperatorKernel {
    Cast(const Operator& op, c10::DeviceType device) : op(op), device(device) {
        for (size_t i = 0; i < op.required(); ++i) {  // the first arguments, all tensors
            // k_cache, v_cache and latent_cache
            const bool is_cache = op.schema.arguments()[i].name().find("cache") != std::string::npos;
            if (op.autocast == Autocast::Region || !is_cache) {
                always.push_back(i);
            } else if (!cache) {
                cache = i;
            }
        }
        if (op.autocast != Autocast::Region) return;
        for (const char* name : {"attn_bias", "sinks"}) {
            if (const auto i = op.find(name)) if_half.push_back(*i);
        }
    }

    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) const {
        const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device));
        c10::IValue* const arguments = stack->data() + (stack->size() - op.count());
        const auto dtype = cache ? cache_dtype(arguments[*cache].toTensor()) : at::autocast::get_autocast_dtype(device);
        const auto cast = [&](size_t i) { arguments[i] = at::autocast::cached_cast(dtype, arguments[i].toTensor(), device); };
        for (const size_t i : always) cast(i);
        for (const size_t i : if_half) {
            if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
            const auto type = arguments[i].toTensor().scalar_type();
            if (type == at::kHalf || type == at::kBFloat16) cast(i);
        }
        handle.callBoxed(*stack);
    }

    // Returns the dtype for q, and for new keys and values. A quantized cache, which has elements of one byte, does not decide it.
    at::ScalarType cache_dtype(const Tensor& t) const {
        return t.element_size() == 1 ? at::autocast::get_autocast_dtype(device) : t.scalar_type();
    }

    const Operator& op;
    const c10::DeviceType device;
    // indices of arguments
    std::vector<size_t> always;  // cast in each call
    std::vector<size_t> if_half;  // added to scores: cast from fp16 or bf16 only, because operators take fp32 ones with every q
    std::optional<size_t> cache;  // the first cache; none with Autocast::Region
};

}  // namespace

torch::CppFunction autocast_kernel(const Operator& op, c10::DeviceType device) { return boxed<Cast>(op, device); }

}  // namespace volta_fa
