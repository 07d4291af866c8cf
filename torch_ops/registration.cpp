// Implements registration.h: finds an earlier copy of this library in the process by its operators in PyTorch's dispatcher.

#include "registration.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <dlfcn.h>

#include <string>

namespace volta_fa {
namespace {

std::string own_path() {
    Dl_info found{};
    const bool is_found = dladdr(reinterpret_cast<const void*>(&is_first_copy), &found) != 0 && found.dli_fname != nullptr;
    return is_found ? found.dli_fname : "libvolta_fa.so";
}

// Returns the path of the copy that registered the operators, if there is one.
std::optional<std::string> registered_path() {
    auto& dispatcher = c10::Dispatcher::singleton();
    if (!dispatcher.findSchema({"volta_fa::fwd", ""})) return std::nullopt;
    const auto path = dispatcher.findSchema({"volta_fa::_library_path", ""});
    return path ? path->typed<std::string()>().call() : "another library";
}

}  // namespace

bool is_first_copy() {
    static const bool is_first = [] {
        const auto other = registered_path();
        if (other) {
            TORCH_WARN("volta_fa: ", own_path(), " registers nothing: torch.ops.volta_fa comes from ", *other,
                       ". Load one copy in a process.");
        }
        return !other;
    }();
    return is_first;
}

Registration::Registration(torch::Library::Kind kind, std::optional<c10::DispatchKey> key, const char* file, uint32_t line,
                           void (*add)(torch::Library&)) {
    if (!is_first_copy()) return;
    // leaked, because other threads may call an operator while the process ends, and kernels have state
    add(*new torch::Library(kind, "volta_fa", key, file, line));
}

}  // namespace volta_fa

// the package (python/volta_fa/library.py) compares it with the library that it would load
VOLTA_FA_LIBRARY_FRAGMENT(m) {
    m.def("_library_path() -> str", [] { return volta_fa::own_path(); });
}
