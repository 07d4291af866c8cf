// Conditional<First, A, B>::Type is A or B: std::conditional, which NVRTC lacks. Used where a kernel's features select a type.
#pragma once

template <bool First, class A, class B>
struct Conditional {
    using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
    using Type = B;
};
