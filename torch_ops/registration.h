// Macros like torch/library.h's for namespace volta_fa, which register nothing in the second copy of this library in a process.
//
// Without them the process ends if two copies are loaded, as from a wheel and from Hugging Face's hub. PyTorch raises an error for
// an operator that is defined twice, and nothing catches an error of a static initializer.
#pragma once

#include <c10/macros/Macros.h>
#include <torch/library.h>

#include <optional>

namespace volta_fa {

// C10_HIDDEN, so that each copy has its own symbols, even if one was loaded with RTLD_GLOBAL.

// Returns whether this copy registers the operators. Another copy that is already there wins; then this one warns, once.
C10_HIDDEN bool is_first_copy();

// A static object of each VOLTA_FA_... block below: in the first copy, calls `add` with the block's torch::Library.
struct C10_HIDDEN Registration {
    Registration(torch::Library::Kind kind, std::optional<c10::DispatchKey> key, const char* file, uint32_t line,
                 void (*add)(torch::Library&));
};

}  // namespace volta_fa

// `m` names the torch::Library in the block that follows the macro; `uid` makes names unique in a file.
#define VOLTA_FA_REGISTER(kind, key, m, uid)                                                      \
    static void C10_CONCATENATE(volta_fa_register_, uid)(torch::Library&);                        \
    static const ::volta_fa::Registration C10_CONCATENATE(volta_fa_registration_, uid)(           \
        torch::Library::kind, key, __FILE__, __LINE__, C10_CONCATENATE(volta_fa_register_, uid)); \
    void C10_CONCATENATE(volta_fa_register_, uid)(torch::Library & m)

#define VOLTA_FA_LIBRARY(m) VOLTA_FA_REGISTER(DEF, std::nullopt, m, C10_UID)
#define VOLTA_FA_LIBRARY_FRAGMENT(m) VOLTA_FA_REGISTER(FRAGMENT, std::nullopt, m, C10_UID)
#define VOLTA_FA_LIBRARY_IMPL(key, m) VOLTA_FA_REGISTER(IMPL, c10::DispatchKey::key, m, C10_UID)
