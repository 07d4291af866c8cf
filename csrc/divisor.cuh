// Division by a number that the host knows: a multiplication and a shift. Used by the decode kernels.
#pragma once

#include "volta_fa_params.h"  // generated from src/params: Divisor

// Returns n / d.divisor, for 0 <= n < 2^31. d.factor is 2^d.shift / d.divisor, rounded up.
__device__ __forceinline__ int quotient(int n, const Divisor& d) {
    return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * d.factor >> d.shift);
}
