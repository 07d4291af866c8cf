// Describes a tensor for Rust: dtype, device, sizes and strides. In meta kernels sizes may be symbolic.

#include "rust.h"

#include <algorithm>

namespace volta_fa {
namespace {

int32_t device_kind(const at::Device& device) { return device.is_cpu() ? 0 : device.is_cuda() ? 1 : device.is_meta() ? 2 : 3; }

}  // namespace
}  // namespace volta_fa

// Returns false after an exception, because no exception may cross into Rust.
extern "C" bool volta_fa_describe(const void* tensor, TensorInfo* info) {
    using volta_fa::known;
    try {
        const auto& t = *static_cast<const at::Tensor*>(tensor);
        const auto sizes = t.sym_sizes(), strides = t.sym_strides();
        constexpr size_t room = std::extent_v<decltype(info->sizes)>;
        info->dtype = static_cast<int32_t>(t.scalar_type());
        info->device_kind = volta_fa::device_kind(t.device());
        info->device_index = t.device().index();
        info->rank = static_cast<int64_t>(sizes.size());
        for (size_t i = 0; i < std::min(sizes.size(), room); ++i) {
            info->sizes[i] = known(sizes[i]);
            info->strides[i] = known(strides[i]);
        }
        return true;
    } catch (...) {
        return false;
    }
}
