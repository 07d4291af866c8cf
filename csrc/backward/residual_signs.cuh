// How P passes from the warps that compute S (first role) to those that compute dP (second role), in the warp-specialized kernels:
// as fp16, with the direction of its rounding in the sign bit, which P leaves free. Set: fp16 rounded P down.
//
// The second role rounds dS = P * (dP - delta) to fp16. With P rounded to fp16 before, the errors of dq and dk are 1.24 times those
// of one rounding. The true P lies above or below its fp16 number by up to half a unit in the last place. The mean distance, a
// quarter of a unit, is 2^-12 to 2^-13 of P. Corrected by it (kResidual), the errors are 1.07 times those of one rounding
// (docs/design/numerics.md).
#pragma once

#include "backward/probabilities.cuh"  // pack_shifted(), shifted_sum() (softmax.cuh)
#include "features.cuh"  // kRequiresDropout: every problem of the kernel has dropout

constexpr float kResidual = 1.7263349e-4f;  // 2^-12.5 of P

constexpr unsigned kSigns = 0x80008000u;  // of two packed elements

// Returns a word whose lower half has byte 1 of `lo` as its upper byte, and whose upper half has that of `hi`. So bit 15 of either
// number becomes the sign of an fp16 number. The lower bytes mean nothing.
__device__ __forceinline__ unsigned second_bytes(unsigned lo, unsigned hi) { return __byte_perm(lo, hi, 0x5010); }

// For kernels that pack P by integers: packs two numbers as pack_shifted (softmax.cuh) does, and sets `with_signs` to the same with
// signs. The numbers are scaled by 2^-112, so their fp32 bits times 8 have the fp16 number in the upper half, and adding 0x8000
// rounds it: shifted_sum. Bit 15 of that sum is set where the addition has not carried into the fp16 number: the true number lies
// above it, or is equal.
__device__ __forceinline__ unsigned pack_shifted_and_signs(float lo, float hi, unsigned& with_signs) {
    const unsigned packed = pack_shifted(lo, hi);
    with_signs = packed | (second_bytes(shifted_sum(lo), shifted_sum(hi)) & kSigns);
    return packed;
}
// For kernels that pack P by conversions: adds signs to `packed`, which to_half2 has made of lo and hi. to_half2 drops bits 0 to 12
// of the fp32 number, and rounds up where bit 12 is set; << 3 moves it to bit 15. (Signs of subnormals mean nothing, and half of
// the ties get the wrong one.)
__device__ __forceinline__ unsigned with_residual_signs(unsigned packed, float lo, float hi) {
    return packed | (~(second_bytes(__float_as_uint(lo), __float_as_uint(hi)) << 3) & kSigns);
}

// Returns P from an element that to_float2 has unpacked, corrected by one FFMA. has_residuals = false: the sign marks a dropped
// element instead, as always in kernels compiled for dropout (kRequiresDropout).
__device__ __forceinline__ float from_residual_sign(float p, bool has_residuals) {
    if (kRequiresDropout) return fabsf(p);
    return fmaf(p, has_residuals ? -kResidual : 0.f, fabsf(p));
}
