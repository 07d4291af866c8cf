// PyTorch's setting of the precision of float32 products on CUDA.

#include <ATen/Context.h>
#include <torch/version.h>

#include "precision.h"
#include "registration.h"
#include "rust.h"

namespace volta_fa {

// Returns whether the user allows products with less precision than fp32. Then fp32 tensors take the scaled fp16 kernels
// (src/ops/scaled.rs), else those of two parts (src/ops/split.rs).
bool reduces_fp32() {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9
    return at::globalContext().float32MatmulPrecision() != at::Float32MatmulPrecision::HIGHEST;
#else
    // torch.backends.cuda.matmul.fp32_precision; torch.set_float32_matmul_precision sets it too
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
    return at::globalContext().float32Precision("cuda", "matmul") == "tf32";
#else
    return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
#endif
#endif
}

}  // namespace volta_fa

VOLTA_FA_LIBRARY_FRAGMENT(m) { m.def("_reduces_fp32() -> bool", volta_fa::reduces_fp32); }

extern "C" bool volta_fa_reduces_fp32() {
    try {
        return volta_fa::reduces_fp32();
    } catch (...) {
        return false;  // no exception may cross into Rust
    }
}
