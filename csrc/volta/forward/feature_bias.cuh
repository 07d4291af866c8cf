// fp16 attn_bias, alone or with dropout (feature_dropout.cuh), in volta forward kernels that require these features: overrides
// functions of ScoreFeature. The main loops (register_q.cuh, shared_q.cuh) call them; score_feature.cuh has their order and what
// each is for.
#pragma once

#include "volta/forward/score_feature.cuh"

namespace volta {

// The bias is loaded one product ahead. With one tile of keys a step (register_q.cuh) it is the product's initial accumulator, and
// its address lies in the lane's scratch (LaneScratch: 16-byte chunks of shared memory that only this lane uses). With more
// (shared_q.cuh), it is added after the product. Strides of the bias are in elements, 0 where it is broadcast.
//
// ForwardLayout (layout.cuh): of each 16x16 tile a lane has kRows (2) rows, first_query() + row_slot(0 or 1), and four consecutive
// keys from first_key() on. Its element v (of kElements, 8) is in row row_of(v), at key first_key() + key_slot(v).
//
// RowTiles, KeyTiles: the warp's tiles of 16 query rows (mt), and of 16 keys a step (nt). r is one of a lane's two rows of a tile.
// Grid: the kernel's grid policy, which has a block's head and batch entry. Arguments `row`, `key`: first of the warp's scores of a
// step. Tile: a lane's scores of a step. Base, without a feature, has the functions that are not overridden.
template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, kFeatureBias, Grid> : public ScoreFeature<RowTiles, KeyTiles, 0, Grid> {
    using Base = ScoreFeature<RowTiles, KeyTiles, 0, Grid>;
    static constexpr bool kIsInitial = KeyTiles == 1;  // products start with the bias as initial accumulator

    struct BiasAddress {
        const unsigned short* base;  // key 0 of the lane's first row
        int rows_left, first_key;  // rows of the tensor after that one; the lane's first key in a tile
    };
    BiasAddress address_;  // unless kIsInitial: then it lies in memory_
    LaneScratch memory_;
    uint2 loaded_[RowTiles][KeyTiles][ForwardLayout::kRows];  // four fp16 of each row

    // Calls f(row tile, key tile, element, bias) for each score of the lane, with the loaded bias as float.
    template <class F>
    __device__ __forceinline__ void each(F f) const {
        unrolled<RowTiles, KeyTiles, ForwardLayout::kRows>([&](int mt, int nt, int r) {
            const float2 low = to_float2(loaded_[mt][nt][r].x), high = to_float2(loaded_[mt][nt][r].y);
            const float x[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
            for (int v = 0; v < ForwardLayout::kElements; v++)
                if (ForwardLayout::row_of(v) == r) f(mt, nt, v, x[ForwardLayout::key_slot(v)]);
        });
    }
    // Returns the address of key 0 in the lane's first row. Rows past the last count as the last.
    __device__ __forceinline__ static const unsigned short* base_of(const FwdParams& p, const Grid& grid, const ForwardLane& lane,
                                                                    int row) {
        const ScoreOptions& o = p.score_options;
        return o.bias + grid.remat_batch(p.problem) * o.bias_batch_stride + grid.remat_head(p.problem) * o.bias_head_stride +
               min(row + ForwardLayout::first_query(lane), p.problem.seqlen_q - 1) * o.bias_row_stride;
    }
    // Returns 1 / |softmax_scale|, divided at each use (Q has the scale's sign). The scale passes through keep_in_register(), so
    // that the compiler cannot compute the quotient early and hold it.
    __device__ __forceinline__ static float inverse_scale(const FwdParams& p) {
        return __fdividef(1.f, __int_as_float(keep_in_register(__float_as_int(p.problem.scale))));
    }
    __device__ __forceinline__ static int rows_left(const FwdParams& p, const ForwardLane& lane, int row) {
        return max(p.problem.seqlen_q - 1 - row - ForwardLayout::first_query(lane), 0);
    }

    // Adds the loaded bias. Scores here are products before the softmax scales them, so the bias is divided by the scale.
    __device__ __forceinline__ void add(const FwdParams& p, typename Base::Tile& s) const {
        const float factor = inverse_scale(p);
        each([&](int mt, int nt, int v, float x) { s.tile[mt][nt][v] = fmaf(x, factor, s.tile[mt][nt][v]); });
    }

public:
    using typename Base::Tile;
    static constexpr int kLaneScratchChunks = kIsInitial ? 1 : 0;  // 16-byte chunks of memory_: a BiasAddress

    __device__ __forceinline__ ScoreFeature(const FwdParams& p, const Grid& grid, const Mask& mask,
                                            typename Base::Unmasked& unmasked, const LaneScratch& memory, int row, int key)
        : Base(p, grid, mask, unmasked, memory, row, key), memory_(memory) {
        // Reads the thread index again. Else the epilogue would share this lane number, which would hold a register until then.
        const ForwardLane lane(remat_thread_index() & 31);
        address_.base = base_of(p, grid, lane, row);
        if (!kIsInitial) return;
        const unsigned long long base = reinterpret_cast<unsigned long long>(address_.base);
        memory.store(0, make_uint4(static_cast<u32>(base), static_cast<u32>(base >> 32), rows_left(p, lane, row),
                                   ForwardLayout::first_key(lane)));
    }
    // Loads the bias of the step at `key`. Keys past the last group of four read that group (the host pads rows to a multiple of 4
    // keys), rows past the last the last row: these scores are masked or not stored.
    __device__ __forceinline__ void load(const FwdParams& p, int row, int key) {
        BiasAddress address = address_;
        if (kIsInitial) {
            const uint4 x = memory_.load(0);
            address.base = reinterpret_cast<const unsigned short*>(x.x | static_cast<unsigned long long>(x.y) << 32);
            address.rows_left = x.z;
            address.first_key = x.w;
        } else {
            const ForwardLane lane(remat_thread_index() & 31);
            address.rows_left = rows_left(p, lane, row);
            address.first_key = ForwardLayout::first_key(lane);
        }
        const unsigned row_stride = p.score_options.bias_row_stride;
#pragma unroll
        for (int nt = 0; nt < KeyTiles; nt++) {
            const unsigned short* from = address.base + min(key + 16 * nt + address.first_key, (p.problem.seqlen_k - 1) & ~3);
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
                for (int r = 0; r < ForwardLayout::kRows; r++) {
                    const int rows = min(16 * mt + ForwardLayout::row_slot(r), address.rows_left);
                    const unsigned short* at = rows_after(from, rows, row_stride);
                    // not load_global2_constant(): ptxas would move it past the next barrier, to where it is used
                    loaded_[mt][nt][r] = load_global2(at);
                }
        }
    }
    __device__ __forceinline__ void init_accumulators(const FwdParams& p, Tile& s, int, int) const {
        s.clear();
        if (kIsInitial) add(p, s);
    }
    __device__ __forceinline__ void add_to(const FwdParams& p, Tile& s) const {
        if (!kIsInitial) add(p, s);
    }
};

}  // namespace volta
