// Tensors whose class is one of Python's.
#pragma once

#include <ATen/core/Tensor.h>

namespace volta_fa {

using at::Tensor;

// Whether calls with it go to its class first.
bool is_subclass(const Tensor& t);

// Whether it is a subclass whose rules for the ops exist; loads them.
bool has_rules(const Tensor& t);

}  // namespace volta_fa
