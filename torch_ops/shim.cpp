// C functions that Rust calls (src/shim.rs declares them): a tensor's description, and the precision of float32 products, which
// Python asks for too (`_reduces_fp32`). No exception may cross into Rust. After one both return false: Rust rejects the tensor,
// and fp32 products keep nearly all digits.

#include "registration.h"
#include "rust.h"

#include <ATen/Context.h>
#include <torch/version.h>

#include <algorithm>

namespace volta_fa {
namespace {

// Returns TensorInfo::device_kind of src/shim.rs.
int32_t device_kind(const at::Device& device) { return device.is_cpu() ? 0 : device.is_cuda() ? 1 : device.is_meta() ? 2 : 3; }

// Returns whether the user allows products of fp32 matrices with less precision. Then fp32 tensors are scaled and rounded to fp16
// (src/ops/scaled.rs). Else a scaled number becomes the sum of two fp16 numbers, which keeps 22 of its 24 bits (`split_forward`
// there).
bool reduces_fp32() {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9
    return at::globalContext().float32MatmulPrecision() != at::Float32MatmulPrecision::HIGHEST;
#elif TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
    // torch.backends.cuda.matmul.fp32_precision; torch.set_float32_matmul_precision sets it too
    return at::globalContext().float32Precision("cuda", "matmul") == "tf32";
#else
    return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
#endif
}

}  // namespace
}  // namespace volta_fa

// Fills `info` with a tensor's dtype, device, sizes and strides. Symbolic sizes, of meta kernels, become INT64_MIN.
extern "C" bool volta_fa_describe(const void* tensor, TensorInfo* info) {
    using volta_fa::size_or_unknown;
    try {
        const auto& t = *static_cast<const at::Tensor*>(tensor);
        const auto sizes = t.sym_sizes(), strides = t.sym_strides();
        constexpr size_t room = std::extent_v<decltype(info->sizes)>;
        info->dtype = static_cast<int32_t>(t.scalar_type());
        info->device_kind = volta_fa::device_kind(t.device());
        info->device_index = t.device().index();
        info->rank = static_cast<int64_t>(sizes.size());
        for (size_t i = 0; i < std::min(sizes.size(), room); ++i) {
            info->sizes[i] = size_or_unknown(sizes[i]);
            info->strides[i] = size_or_unknown(strides[i]);
        }
        return true;
    } catch (...) {
        return false;
    }
}

extern "C" bool volta_fa_reduces_fp32() {
    try {
        return volta_fa::reduces_fp32();
    } catch (...) {
        return false;
    }
}

VOLTA_FA_LIBRARY_FRAGMENT(m) { m.def("_reduces_fp32() -> bool", volta_fa::reduces_fp32); }
