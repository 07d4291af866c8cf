// How arguments travel to Rust: one overload for each kind of the option list (src/options.rs).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <limits>
#include <optional>

// Maybe<T> of src/options.rs.
struct MaybeInt {
    bool given;
    int64_t value;
};
struct MaybeFloat {
    bool given;
    double value;
};

namespace volta_fa {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// at::Tensor*, borrowed; null is None.
inline void* handle(const Tensor& t) { return t.defined() ? const_cast<Tensor*>(&t) : nullptr; }
inline void* handle(const OptionalTensor& t) { return t ? handle(*t) : nullptr; }

// A number that may be symbolic: UNKNOWN of src/options.rs then.
inline int64_t known(int64_t n) { return n; }
inline int64_t known(const c10::SymInt& n) { return n.maybe_as_int().value_or(std::numeric_limits<int64_t>::min()); }

template <class Int>
MaybeInt maybe(const std::optional<Int>& n) {
    return {n.has_value(), n ? known(*n) : 0};
}
inline MaybeFloat maybe(const std::optional<double>& x) { return {x.has_value(), x.value_or(0.0)}; }

}  // namespace volta_fa
