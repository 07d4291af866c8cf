// Calls Rust. cbindgen generates volta_fa_abi.h from src/ffi.rs and src/shim.rs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "ops.h"
#include "volta_fa_abi.h"

namespace volta_fa {

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

// Returns the arguments that both ops have, without the stream. They borrow the tensors. An rng_state without elements, which fwd
// returns without dropout, counts as none.
template <class Int>
AttentionArgs attention_args(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& rng_state,
                             VOLTA_FA_OPTION_PARAMETERS(Int)) {
    const bool drawn = rng_state && rng_state->defined() && known(rng_state->sym_numel()) != 0;
    return {
        handle(q),         handle(k), handle(v), drawn ? handle(rng_state) : nullptr, option_args<Int>(VOLTA_FA_OPTION_ARGUMENTS),
        /*stream=*/nullptr};
}

template <class Int>
BackwardArgs backward_args(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                           const Tensor& softmax_lse, const OptionalTensor& rng_state, VOLTA_FA_OPTION_PARAMETERS(Int),
                           bool attn_bias_requires_grad, const OptionalTensor& dlse) {
    return {attention_args<Int>(q, k, v, rng_state, VOLTA_FA_OPTION_ARGUMENTS),
            handle(dout),
            handle(out),
            handle(softmax_lse),
            handle(dlse),
            attn_bias_requires_grad};
}

}  // namespace volta_fa
