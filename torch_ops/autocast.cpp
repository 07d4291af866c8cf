// Autocast kernels. They cast like PyTorch's own attention.

#include "operators.h"

#include <ATen/autocast_mode.h>

namespace volta_fa {
namespace {

struct Cast final : c10::OperatorKernel {
    Cast(const Operator& op, c10::DeviceType device) : op(op), device(device) {
        for (size_t i = 0; i < op.tensors(); ++i) {
            const bool is_cache = op.schema.arguments()[i].name().find("cache") != std::string::npos;
            if (op.autocast == Autocast::Region || !is_cache) {
                required.push_back(i);
            } else if (!cache) {
                cache = i;
            }
        }
        if (op.autocast != Autocast::Region) return;
        for (const char* name : {"attn_bias", "sinks"}) {
            if (const auto place = op.find(name)) scores.push_back(*place);
        }
    }

    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) const {
        const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device));
        c10::IValue* const arguments = stack->data() + (stack->size() - op.count());
        const auto dtype = cache ? cache_dtype(arguments[*cache].toTensor()) : at::autocast::get_autocast_dtype(device);
        const auto cast = [&](size_t i) { arguments[i] = at::autocast::cached_cast(dtype, arguments[i].toTensor(), device); };
        for (const size_t i : required) cast(i);
        for (const size_t i : scores) {
            if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
            const auto type = arguments[i].toTensor().scalar_type();
            if (type == at::kHalf || type == at::kBFloat16) cast(i);
        }
        handle.callBoxed(*stack);
    }

    // The cache is updated in place. A quantized cache has elements of one byte, whose type is not that of q.
    at::ScalarType cache_dtype(const Tensor& t) const {
        return t.element_size() == 1 ? at::autocast::get_autocast_dtype(device) : t.scalar_type();
    }

    const Operator& op;
    const c10::DeviceType device;
    std::vector<size_t> required;
    std::optional<size_t> cache;
    // cast only if they are fp16 or bf16, because fp32 ones go with every q
    std::vector<size_t> scores;
};

}  // namespace

torch::CppFunction autocast_kernel(const Operator& op, c10::DeviceType device) { return boxed<Cast>(op, device); }

}  // namespace volta_fa
