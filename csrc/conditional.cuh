// std::conditional, because NVRTC has no <type_traits>.
#pragma once

template <bool First, class A, class B>
struct Conditional {
    using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
    using Type = B;
};
