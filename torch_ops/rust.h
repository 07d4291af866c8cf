// Calls Rust. cbindgen generates volta_fa_abi.h from src/ffi.rs, src/operators.rs, src/shim.rs and src/value.rs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "volta_fa_abi.h"

namespace volta_fa {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Returns a number; UNKNOWN of src/options.rs for a symbolic one.
inline int64_t known(const c10::SymInt& n) { return n.maybe_as_int().value_or(std::numeric_limits<int64_t>::min()); }

inline std::string take_string(char* text) {
    std::string copy = text ? text : "";
    volta_fa_free_string(text);
    return copy;
}

// Raises the exception of a failed call.
inline void check(Status status) {
    if (status.code == 0) return;
    const std::string message = take_string(status.message);
    TORCH_CHECK_VALUE(status.code != 1, message);
    TORCH_CHECK_NOT_IMPLEMENTED(status.code != 2, message);
    TORCH_CHECK(false, message);
}

// Takes ownership of a tensor that Rust released.
inline Tensor take_tensor(void* handle) {
    std::unique_ptr<Tensor> owned(static_cast<Tensor*>(handle));
    return std::move(*owned);
}

// Returns the current cudaStream_t of the tensor's device; null on the CPU (stream.cpp).
void* current_stream(const Tensor& t);

}  // namespace volta_fa
