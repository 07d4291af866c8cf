// Converts arguments for Rust: one overload per kind of option (src/options.rs).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <limits>
#include <optional>

// Maybe<T> in src/options.rs.
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

// Returns a borrowed at::Tensor*; null for None.
inline void* handle(const Tensor& t) { return t.defined() ? const_cast<Tensor*>(&t) : nullptr; }
inline void* handle(const OptionalTensor& t) { return t ? handle(*t) : nullptr; }

// Returns a number; UNKNOWN of src/options.rs for a symbolic one.
inline int64_t known(int64_t n) { return n; }
inline int64_t known(const c10::SymInt& n) { return n.maybe_as_int().value_or(std::numeric_limits<int64_t>::min()); }

template <class Int>
MaybeInt maybe(const std::optional<Int>& n) {
    return {n.has_value(), n ? known(*n) : 0};
}
inline MaybeFloat maybe(const std::optional<double>& x) { return {x.has_value(), x.value_or(0.0)}; }

}  // namespace volta_fa
