// P from the warps that compute S (first role) to those that compute dP (second role): fp16, with the direction of its rounding in
// the sign bit, which P leaves free.
//
// The second role rounds dS = P * (dP - delta) to fp16. If P is rounded to fp16 before, the errors of dq and dk are 1.24 times
// those of one rounding. An element with a sign is above its fp16 number by up to half a unit in the last place, one without is
// below by as much. The mean of that, a quarter of a unit, is 2^-12 to 2^-13 of P. Corrected by kResidual, the errors are 1.07
// times those of one rounding (docs/design/numerics.md).
#pragma once

#include "backward/probabilities.cuh"
#include "features.cuh"

constexpr float kResidual = 1.7263349e-4f;  // 2^-12.5 of P

constexpr unsigned kSigns = 0x80008000u;  // of two packed elements

// Gathers bytes 1 of two words into the upper byte of each half.
__device__ __forceinline__ unsigned second_bytes(unsigned lo, unsigned hi) { return __byte_perm(lo, hi, 0x5010); }

// Packs two numbers as pack_shifted (softmax.cuh) does: it keeps the upper half of shifted_sum, x * 8 + 0x8000. Sets `with_signs`
// to the same with signs. Bit 15 of a sum is set where the addition has not carried: the number lies above its fp16, or is equal.
__device__ __forceinline__ unsigned pack_shifted_and_signs(float lo, float hi, unsigned& with_signs) {
    const unsigned packed = pack_shifted(lo, hi);
    with_signs = packed | (second_bytes(shifted_sum(lo), shifted_sum(hi)) & kSigns);
    return packed;
}
// Adds signs to `packed`, which to_half2 has made of these numbers. It rounds up where the highest bit that it drops is set:
// bit 12 of 13. (Not in subnormals, whose signs mean nothing, nor in half of the ties.)
__device__ __forceinline__ unsigned with_residual_signs(unsigned packed, float lo, float hi) {
    return packed | (~(second_bytes(__float_as_uint(lo), __float_as_uint(hi)) << 3) & kSigns);
}

// Returns P from an element that to_float2 has unpacked, by one FFMA. has_residuals = false: its sign means something else, as
// always in kernels that require dropout.
__device__ __forceinline__ float from_residual_sign(float p, bool has_residuals) {
    if (kRequiresDropout) return fabsf(p);
    return fmaf(p, has_residuals ? -kResidual : 0.f, fabsf(p));
}
