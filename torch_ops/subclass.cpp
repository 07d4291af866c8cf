// Recognizes tensor subclasses of Python, for autograd.cpp and sdpa.cpp. DTensor is the only one with rules for volta_fa's
// operators, in python/volta_fa/distributed/dtensor.py. The operator _has_rules adds the rules when it first receives a DTensor.

#include "operators.h"
#include "registration.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace volta_fa {

bool is_subclass(const Tensor& t) { return t.defined() && t.key_set().has(c10::DispatchKey::Python); }

bool has_rules(const Tensor& t) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::_has_rules", "").typed<bool(const Tensor&)>();
    // without the Python package, which has no DTensor either
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
    // With these keys the call of _has_rules itself would go to the subclass.
    const c10::impl::ExcludeDispatchKeyGuard guard(
        c10::DispatchKeySet{c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
    return op.call(t);
}

}  // namespace volta_fa

// python/volta_fa/integrations/dtensor.py implements this operator.
VOLTA_FA_LIBRARY_FRAGMENT(m) { m.def("_has_rules(Tensor t) -> bool"); }
