// Helpers with which torch_ops/*.cpp call Rust: conversions of strings, errors and tensors. cbindgen generates volta_fa_abi.h from
// Rust's sources, src/ffi.rs above all (build.rs): it declares Rust's functions (volta_fa_...) and types.
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

// Returns a size for Rust. The least int64 stands for a symbolic one of torch.compile (UNKNOWN in src/options.rs).
inline int64_t size_or_unknown(const c10::SymInt& n) { return n.maybe_as_int().value_or(std::numeric_limits<int64_t>::min()); }

// Copies a string that Rust allocated, and frees it. Null becomes "".
inline std::string take_string(char* text) {
    std::string copy = text ? text : "";
    volta_fa_free_string(text);
    return copy;
}

// Raises the exception of a failed call: code 1 is Python's ValueError, 2 NotImplementedError, others RuntimeError.
inline void check(Status status) {
    if (status.code == 0) return;
    const std::string message = take_string(status.message);
    TORCH_CHECK_VALUE(status.code != 1, message);
    TORCH_CHECK_NOT_IMPLEMENTED(status.code != 2, message);
    TORCH_CHECK(false, message);
}

// Returns a tensor whose ownership Rust gave up: `handle` is an at::Tensor* from new.
inline Tensor take_tensor(void* handle) {
    std::unique_ptr<Tensor> owned(static_cast<Tensor*>(handle));
    return std::move(*owned);
}

// Returns the current cudaStream_t of the tensor's device; null on the CPU (stream.cpp).
void* current_stream(const Tensor& t);

}  // namespace volta_fa
