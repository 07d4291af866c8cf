// The order of dq's fp32 accumulator: that in which the lanes of a warp hold their sums (dq_product.cuh), so that a warp adds to
// whole lines of 128 bytes.
//
// 256 floats are 32 queries by 8 columns, or 16 by 16 at headdims whose steps have 16 queries. They are eight lines, one for each
// accumulator element v of a lane; in its line a lane is number place(), so that two columns of a query are neighbours.
#pragma once

namespace volta {

struct DqAccumulator {
    static constexpr int kTileFloats = 256, kLineFloats = 32;
    static __device__ __forceinline__ constexpr bool has_short_steps(int headdim) { return headdim > 192; }
    // A lane's place in its line. (quad: t % 4)
    static __device__ __forceinline__ constexpr int line_offset(int half, int qn, int qm, int quad) {
        return 16 * half + 8 * qn + 4 * qm + quad % 2 * 2 + quad / 2;
    }

    // Element (row, column) of a sequence lies at row(row) + column(column) from the sequence's first. Bits of the row are, from
    // the lowest: of t, of v, qn, half (Lane), and qm, which in short steps is bit 3 of the column.
    // (Integer, because offsets inside a tile fit an int.)
    template <class Integer>
    static __device__ __forceinline__ Integer row(Integer row, int headdim) {
        const int rows = has_short_steps(headdim) ? 16 : 32, in_step = static_cast<int>(row % rows);
        return (row - in_step) * headdim + (in_step & 2) * kLineFloats + (in_step & 1) * 2 + (in_step & 12) * 2 +
               (in_step & 16) / 4;
    }
    static __device__ __forceinline__ int column(int column, int headdim) {
        return has_short_steps(headdim) ? column / 16 * kTileFloats + (column & 8) / 2 : column / 8 * kTileFloats;
    }
    // The eight elements from one whose column is a multiple of 8.
    static __device__ __forceinline__ void load8(const float* from, float4& a, float4& b) {
        const auto pair = [&](int v) { return *reinterpret_cast<const float2*>(from + v * kLineFloats); };
        const float2 x = pair(0), y = pair(1), z = pair(4), w = pair(5);
        a = make_float4(x.x, y.x, x.y, y.y), b = make_float4(z.x, w.x, z.y, w.y);
    }

    // Who converts what (finish.cuh): a warp has 16 rows by 16 columns, so that each of its loads takes whole lines and each of its
    // stores whole sectors.
    static constexpr int kLanesPerRow = 4;
    static __device__ __forceinline__ int row_of(int thread) {
        const int lane = thread % 32, warp = thread / 32;
        return lane / 2 % 2 + warp % 2 * 2 + lane / 4 * 4 + warp / 4 * 32;
    }
    static __device__ __forceinline__ int chunk_of(int thread) { return thread % 2 + thread / 64 % 2 * 2; }
};

}  // namespace volta
