// Backward, main kernel for headdim up to 64: 4 warps, each with dV and dK of its own 32 keys, two blocks
// an SM. A warp computes both S^T and dP^T of its keys, so P and dS meet in registers and share one tile
// of shared memory, one after the other.
#include "volta/backward.cuh"

namespace volta {

using S = Shape<HEADDIM, BLOCK_ROWS, STEP, THREADS, 1>;
static_assert(S::kSharedBytes == SHARED_BYTES, "the variant table and the kernel disagree");
static_assert(S::kKeys == 32 * S::kWarps && S::kStep == 32, "a warp has 32 keys x 32 queries of the scores");

using Loader = TileLoader<S::kChunks, S::kStep, THREADS>;
constexpr int kBlocks = HEADDIM / 32;  // of 32 columns

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const u32 shared = shared_address(shared_memory);
    const Lane lane;
    const int warp = threadIdx.x / 32;
    const int first_key = blockIdx.x * S::kKeys, warp_key = 32 * warp;
    const QueryRange<S> range(Mask(p.problem), first_key);

    load_keys<S>(p, shared, first_key);

    const AddressPair score_operands(key_operand<S>(shared + S::kK, lane, warp_key), query_operand<S>(shared + S::kQ, lane, 0));
    const AddressPair packed_addresses(score_operand(shared + S::kScores, lane, warp_key),
                                       packed_address(shared + S::kScores, lane, warp_key, 0));
    const AddressPair dq_operands(DqProduct<S>::a_operand(shared + S::kScores, lane, warp),
                                  DqProduct<S>::b_operand(shared + S::kK, lane, warp));
    const AddressPair query_addresses(column_operand<S>(shared + S::kQ, lane, 0), shared + S::kQ + swizzled<S::kChunks>(threadIdx.x / Loader::kThreadsPerRow, threadIdx.x % Loader::kThreadsPerRow));
    const int stats_lane = (lane_stats_offset(lane)), dq_lane = DqProduct<S>::output_offset(lane, warp);

    Accumulator dk[2][kBlocks][2], dv[2][kBlocks][2];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int j = 0; j < kBlocks; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                clear(dk[m][j][i]);
                clear(dv[m][j][i]);
            }

    const int group = p.problem.nheads / p.problem.nheads_k;  // query heads that share this block's keys
    for (int head = blockIdx.y * group; head < (blockIdx.y + 1) * group && range.first < range.end; head++) {
        const long long head_row = rounded_row(p, blockIdx.z, head);
        float* stats = pinned(p.row_stats + head_row * kStatsPerRow + stats_lane);
        float* dq = pinned(p.dq_accum + head_row * S::kHeaddim + dq_lane);

        Loader q(threadIdx.x, head_base(p.q, blockIdx.z, head) + range.first * p.q.row_stride, p.q.row_stride, p.problem.headdim);
        Loader dout(threadIdx.x, head_base(p.dout, blockIdx.z, head) + range.first * p.dout.row_stride, p.dout.row_stride,
                    p.problem.headdim_v);
        Accumulator s[2][2], dp[2][2];
        q.load(p.problem.seqlen_q - range.first);
        dout.load(p.problem.seqlen_q - range.first);
        load_stats(s, stats + range.first * kStatsPerRow);
        load_stats(dp, stats + kStatsDelta + range.first * kStatsPerRow);
        sync_block();  // the last head's tile is done with
        q.store(query_addresses.second(), S::HeadRows::kRowBytes);
        dout.store(query_addresses.second() + S::kQueryTile, S::HeadRows::kRowBytes);
        sync_block();

#pragma unroll 1
        for (int row = range.first; row < range.end; row += S::kStep) {
            // S^T and dP^T, one chunk of headdim after the other. Rolled, for the instruction cache.
            {
                const u32 a = score_operands.first(), b = score_operands.second();
                constexpr int kRowBytes = S::HeadRows::kRowBytes;
#pragma unroll 1
                for (u32 chunk = 0; chunk < S::kChunks; chunk++) {
                    const u32 a_chunk = S::HeadRows::at_chunk(a, chunk), b_chunk = S::HeadRows::at_chunk(b, chunk);
                    const Fragments<2, 2, kRowBytes> kq(a_chunk, b_chunk), vo(a_chunk + S::kKeyTile, b_chunk + S::kQueryTile);
                    kq.multiply_low(s);
                    vo.multiply_low(dp);
                    kq.multiply_high(s);
                    vo.multiply_high(dp);
                }
            }
            if (!range.unmasked.contain(row)) apply_mask(s, p, first_key + warp_key, row);

            const u32 packed = packed_addresses.second();
            PackedTile ds[2][2];
            exponentials(s, p.problem.scale_log2);
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    store_packed(packed, m, n, pack_probability_tile(s[m][n]));
                    constexpr float kUnpacked = 1.2676506e30f;  // 2^100: see exponentials()
#pragma unroll
                    for (int v = 0; v < 8; v++) dp[m][n][v] *= s[m][n][v] * kUnpacked;
                    ds[m][n] = pack_tile(dp[m][n]);
                }
            sync_warp();

            // The next tile is under way from here on. (Beyond the last row nothing is loaded.)
            q.load(p.problem.seqlen_q - row - S::kStep);
            dout.load(p.problem.seqlen_q - row - S::kStep);
            accumulate_keys<S, 1>(dv, packed_addresses.first(), query_addresses.first() + S::kQueryTile);
            sync_warp();
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < 2; n++) store_packed(packed, m, n, ds[m][n]);
            sync_warp();
            accumulate_keys<S, 1>(dk, packed_addresses.first(), query_addresses.first());
            sync_block();  // dS is complete, and Q and dO are free

            q.store(query_addresses.second(), S::HeadRows::kRowBytes);
            dout.store(query_addresses.second() + S::kQueryTile, S::HeadRows::kRowBytes);
            DqProduct<S> product;
            product.multiply(dq_operands.first(), dq_operands.second());
            product.add_to(dq + row * static_cast<long long>(S::kHeaddim));
            const int next = min(row + S::kStep, p.seqlen_q_rounded - S::kStep);
            load_stats(s, stats + next * kStatsPerRow);
            load_stats(dp, stats + kStatsDelta + next * kStatsPerRow);
            sync_block();  // the next tile is there, and dS is free
        }
    }

    // K and V are no longer needed: their tiles take dK and dV on the way out. Keys that no query sees get 0.
    sync_block();
    keys_to_shared<S, 1>(dk, p.signed_scale, shared + S::kK, warp_key, 0);
    keys_to_shared<S, 1>(dv, 1.f / kProbabilityUnit, shared + S::kV, warp_key, 0);
    sync_block();
    shared_to_output<S>(p.dk, shared + S::kK, first_key, p.problem.seqlen_k, p.problem.headdim);
    shared_to_output<S>(p.dv, shared + S::kV, first_key, p.problem.seqlen_k, p.problem.headdim_v);
}

}  // namespace volta
