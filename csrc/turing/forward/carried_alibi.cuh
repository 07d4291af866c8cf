// ALiBi where it is all that happens to scores: a lane carries one distance along the keys.
#pragma once

#include "turing/forward/layout.cuh"

namespace turing {

template <int RowTiles>
struct CarriedAlibi {
    float slope, distance;  // in units of log2; from the lane's first row to the first of its keys in a tile

    // `row` is the warp's first, `key` the tile's.
    __device__ __forceinline__ void start(const FwdParams& p, const Mask& mask, int row, int key) {
        const Lane lane(lane_here());
        const Alibi alibi(p.score_options, block_batch_here(), head_here<ForwardLayout::kEitherOrder>(p.problem), mask.seqlen_q,
                          mask.seqlen_k);
        slope = alibi.slope;
        distance = alibi.distance(row + ForwardLayout::first_query(lane), key + ForwardLayout::first_key(lane));
    }
    __device__ __forceinline__ void go(int difference) { distance += static_cast<float>(difference); }

    // From products q.k to units of log2.
    __device__ __forceinline__ void add_to(Scores<ForwardLayout, RowTiles, 1>& s, float scale_log2) const {
        s.each([&](float& x, int mt, int, int v) {
            const int place = ForwardLayout::kTileQueries * mt + ForwardLayout::query_slot(v) - ForwardLayout::key_slot(v);
            x = fmaf(x, scale_log2, -slope * fabsf(distance + static_cast<float>(place)));
        });
    }
};

}  // namespace turing
