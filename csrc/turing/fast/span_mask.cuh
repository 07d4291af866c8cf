// Mask of the fast forward kernel (FastForward, forward.cuh): sequence lengths, causal mask, window and a boolean mask, as a bit
// for each key of a span, the kSpan (64, 32 or 16) keys of a step. Where a step needs a mask, or references move (a row's reference
// is what is subtracted from its scores before exp2), a warp makes a SpanMask, and calls apply() on its fp32 scores, a few tiles of
// 8 keys at a time.
#pragma once

#include "features.cuh"
#include "forward/block.cuh"
#include "seqlen_info.cuh"
#include "turing/mma.cuh"

namespace turing {

// Whether the kernel has code for a boolean mask. The fast kernel's variants in src/kernels name this feature Feature::Bias.
constexpr bool kHasMask = kHasBias;

// The keys of a span that rows see, a bit each. Kernel: FastForward. The four lanes of a quad have the same kRows (2 or 4) query
// rows, lane / 4 + 8 * r of the warp. Lane t = lane % 4 keeps the bits of r = t % kRows for all four, in one register or two.
template <class Kernel>
struct SpanMask {
    static constexpr int kRows = Kernel::kRows, kSpan = Kernel::kSpan;
    static constexpr int kWords = (kSpan + 31) / 32;
    u32 bits[kWords];  // bit 0 of word 0: the first key of the next tile

    // `key`: the span's first, a multiple of kSpan. So a span lies in one word of p.mask_bits, or begins with one (key % 32 is then
    // 0). Row i sees keys i + window.low to i + window.high, inclusive. remat_*() read special registers again, to hold none
    // (ptx.cuh); remat_head<true> also serves grids whose first axis is heads. p.mask_bits: a boolean mask packed by prepare.cuh,
    // [batch][head][keys / 32][mask_rows rows]. If all queries share one row, mask_rows is 32: copies of it. Later rows of
    // queries read the last copy, hence the min().
    __device__ __forceinline__ SpanMask(const FastParams& p, int key) {
        const int lane = remat_thread_index() & 31, row = Kernel::remat_warp_row(p) + lane / 4 + 8 * (lane % kRows);
        const BlockSeqlenInfo sequence(p.problem, p.lengths, remat_block_batch());
        const Mask window = mask_of(p.problem, sequence);
        const int first = max(row + window.low, 0) - key, end = min(row + window.high, window.seqlen_k - 1) + 1 - key;
#pragma unroll
        for (int w = 0; w < kWords; w++) bits[w] = ones_from(first - 32 * w) & ~ones_from(end - 32 * w);
        if (kHasMask && p.mask_bits) {
            const u32* words = p.mask_bits + remat_block_batch() * p.mask_bits_batch_stride +
                               remat_head<true>(p.problem) * p.mask_bits_head_stride +
                               static_cast<long long>(key / 32) * p.mask_rows + min(row, p.mask_rows - 1);
#pragma unroll
            for (int w = 0; w < kWords; w++) bits[w] &= __ldg(words + w * p.mask_rows) >> key % 32;
        }
    }
    // Sets the scores of hidden keys to -inf in the next Tiles tiles of 8 keys (in the first call the span's first), and shifts
    // their bits out. s: fp32 bits, [r][tile][keys 2t and 2t + 1]. The whole warp calls it.
    template <int Tiles>
    __device__ __forceinline__ void apply(u32 (&s)[kRows][Tiles][2]) {
        static_assert(Tiles <= 4, "tiles of one word");
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            // the word of the quad's lane r, from this lane's first key (2t) on
            const u32 row_bits = __shfl_sync(~0u, bits[0], r, 4) >> 2 * (remat_thread_index() & 3);
#pragma unroll
            for (int i = 0; i < 2 * Tiles; i++)
                if (!(row_bits >> 8 * (i / 2) & 1 << i % 2)) s[r][i / 2][i % 2] = 0xff800000u;  // -inf
        }
#pragma unroll
        for (int w = 0; w < kWords; w++) bits[w] = __funnelshift_rc(bits[w], w + 1 < kWords ? bits[w + 1] : 0, 8 * Tiles);
    }

private:
    // The bits from `first` on; all if it is negative.
    __device__ __forceinline__ static u32 ones_from(int first) {
        u32 x;
        asm("shl.b32 %0, %1, %2;" : "=r"(x) : "r"(~0u), "r"(max(first, 0)));  // 0 from 32 on
        return x;
    }
};

}  // namespace turing
