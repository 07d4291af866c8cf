// Tensor subclasses in Python.
#pragma once

#include <ATen/core/Tensor.h>

namespace volta_fa {

using at::Tensor;

// Returns true if the dispatcher calls the tensor's Python class first.
bool is_subclass(const Tensor& t);

// Returns true if the tensor's subclass has rules for the ops; loads the rules.
bool has_rules(const Tensor& t);

}  // namespace volta_fa
