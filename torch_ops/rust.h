// Calling Rust: volta_fa_abi.h is generated from src/ffi.rs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "volta_fa_abi.h"

namespace volta_fa {

inline std::string take_string(char *text) {
    std::string copy = text ? text : "";
    volta_fa_free_string(text);
    return copy;
}

// Raise the Python exception that a failed call asks for.
inline void check(Status status) {
    if (status.code == 0) return;
    const std::string message = take_string(status.message);
    TORCH_CHECK_VALUE(status.code != 1, message);
    TORCH_CHECK_NOT_IMPLEMENTED(status.code != 2, message);
    TORCH_CHECK(false, message);
}

// Take over a tensor that Rust released.
inline at::Tensor take_tensor(void *handle) {
    std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor *>(handle));
    return std::move(*owned);
}

}  // namespace volta_fa
