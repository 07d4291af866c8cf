// Tensor subclasses in Python.
#pragma once

#include <ATen/core/Tensor.h>

namespace volta_fa {

using at::Tensor;

// Returns true if the dispatcher calls the tensor's Python class first.
bool is_subclass(const Tensor& t);

// Returns true if volta_fa has sharding rules for the tensor's subclass, which is DTensor alone. The first DTensor loads them from
// Python.
bool has_rules(const Tensor& t);

}  // namespace volta_fa
