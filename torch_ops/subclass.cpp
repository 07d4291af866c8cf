// is_subclass: any Python tensor subclass. has_rules: one that volta_fa handles, which is DTensor alone. Its rules are in Python
// (python/volta_fa/distributed/dtensor.py); the first DTensor loads them. Programs without Python have no DTensor.

#include "operators.h"
#include "registration.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace volta_fa {

bool is_subclass(const Tensor& t) { return t.defined() && t.key_set().has(c10::DispatchKey::Python); }

bool has_rules(const Tensor& t) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::_has_rules", "").typed<bool(const Tensor&)>();
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
    // With these keys the call would dispatch to the subclass itself.
    const c10::impl::ExcludeDispatchKeyGuard guard(
        c10::DispatchKeySet{c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
    return op.call(t);
}

}  // namespace volta_fa

// The Python package implements this op (integrations/dtensor.py).
VOLTA_FA_LIBRARY_FRAGMENT(m) { m.def("_has_rules(Tensor t) -> bool"); }
