// Conditional<First, A, B>::Type is A or B: std::conditional, because NVRTC has no <type_traits>. Included wherever a kernel's
// features select a type.
#pragma once

template <bool First, class A, class B>
struct Conditional {
    using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
    using Type = B;
};
