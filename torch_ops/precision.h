// PyTorch's setting of the precision of float32 products on CUDA.
#pragma once

namespace volta_fa {

// Returns true if the user allows fewer digits than float32 has ("high" or "medium" of torch.set_float32_matmul_precision).
bool reduces_fp32();

}  // namespace volta_fa
