// Element order of dq's fp32 accumulator in global memory on volta. Main kernels (blocks own keys and visit queries in steps) add
// to it by atomics (dq_product.cuh); the postprocess kernel (backward/postprocess.cuh) converts it to dq. The order is that in
// which lanes hold their sums, so that each atomic instruction of a warp covers one whole 128-byte line.
//
// A tile of 256 floats is 32 queries by 8 columns, or 16 by 16 where steps have 16 queries (headdim above 192). It has eight lines
// of 32 floats, one for each accumulator element v (0 to 7) of a lane. In a line two columns of a query are neighbors.
//
// A lane is number t = quad + 4 * half (0 to 7) of its quad-pair, the eight lanes of an 8x8x4 product: quad is lane % 4, half is
// lane / 16. The quad-pair's number in the warp is qm + 2 * qn: bits 2 and 3 of the lane (Lane, volta/mma.cuh).
#pragma once

namespace volta {

// Order of the elements; template argument of BackwardPostprocess.
struct DqAccumulator {
    static constexpr int kTileFloats = 256, kLineFloats = 32;
    static __device__ __forceinline__ constexpr bool has_short_steps(int headdim) { return headdim > 192; }
    // Returns a lane's position in its line, for the atomics of dq_product.cuh. The functions below serve postprocess alone.
    static __device__ __forceinline__ constexpr int line_offset(int half, int qn, int qm, int quad) {
        return 16 * half + 8 * qn + 4 * qm + quad % 2 * 2 + quad / 2;
    }

    // Element (row, column) of a head, column a multiple of 8, lies at row(row) + column(column) floats from the sequence's first;
    // load8() gets it and the next seven. row() counts rows of the sequence. The row's bits are, from the lowest: bit 0 of t,
    // bit 1 of v, then qn, half and qm. Each adds what it adds in line_offset(), bit 1 of v two lines. In steps of 16 queries qm is
    // bit 3 of the column instead. headdim: columns of a row of the accumulator. Integer: type of offsets (long long).
    template <class Integer>
    static __device__ __forceinline__ Integer row(Integer row, int headdim) {
        const int rows = has_short_steps(headdim) ? 16 : 32, in_step = static_cast<int>(row % rows);
        return (row - in_step) * headdim + (in_step & 2) * kLineFloats + (in_step & 1) * 2 + (in_step & 12) * 2 +
               (in_step & 16) / 4;
    }
    static __device__ __forceinline__ int column(int column, int headdim) {
        return has_short_steps(headdim) ? column / 16 * kTileFloats + (column & 8) / 2 : column / 8 * kTileFloats;
    }
    // Loads eight neighboring columns of a row into a and b. `from`: address of the first, whose column is a multiple of 8. Column
    // c of eight is number c / 2 % 2 of a pair in line c % 2 + 4 * (c / 4), counted from the first's line: bit 1 of v is the row's.
    static __device__ __forceinline__ void load8(const float* from, float4& a, float4& b) {
        const auto pair = [&](int v) { return *reinterpret_cast<const float2*>(from + v * kLineFloats); };
        const float2 x = pair(0), y = pair(1), z = pair(4), w = pair(5);
        a = make_float4(x.x, y.x, x.y, y.y), b = make_float4(z.x, w.x, z.y, w.y);
    }

    // For postprocess: the row and the chunk (eight columns, of the first 32) that a thread of its block converts first. A warp has
    // 16 of 32 rows, those with the same bit 1, by 16 columns. So its loads cover whole lines and its stores whole 32-byte sectors.
    static constexpr int kLanesPerRow = 4;  // threads that share a row, in two warps; each goes on with every fourth chunk
    static __device__ __forceinline__ int row_of(int thread) {
        const int lane = thread % 32, warp = thread / 32;
        return lane / 2 % 2 + warp % 2 * 2 + lane / 4 * 4 + warp / 4 * 32;
    }
    static __device__ __forceinline__ int chunk_of(int thread) { return thread % 2 + thread / 64 % 2 * 2; }
};

}  // namespace volta
