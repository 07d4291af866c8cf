// Implements current_stream of rust.h: finds a device's current CUDA stream, on which kernels are launched. The library links no
// CUDA libraries, so that one build serves torch with and without CUDA.

#include "rust.h"

#include <torch/version.h>

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11

#include <c10/core/impl/VirtualGuardImpl.h>

void* volta_fa::current_stream(const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return nullptr;
    return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(t.device()).native_handle();
}

#else  // c10::Stream has no native_handle() yet

#include <dlfcn.h>

namespace {

// Function of torch's C interface for ahead-of-time compiled models; returns 0 on success.
using CurrentStream = int32_t(int32_t device_index, void** stream);

// Finds the function in libtorch_cuda, which processes with CUDA tensors have loaded. In Python, dlsym(RTLD_DEFAULT) misses it.
CurrentStream* find_current_stream() {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<CurrentStream*>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
}

}  // namespace

void* volta_fa::current_stream(const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return nullptr;
    static CurrentStream* const current_stream = find_current_stream();
    TORCH_CHECK(
        current_stream,
        "volta_fa: this torch has no aoti_torch_get_current_cuda_stream in a libtorch_cuda.so, by which the current stream is "
        "found before torch 2.11: install an official build of torch, or torch 2.11 or newer");
    void* stream = nullptr;
    TORCH_CHECK(current_stream(t.device().index(), &stream) == 0, "volta_fa: torch does not tell the current stream of ",
                t.device());
    return stream;
}

#endif
