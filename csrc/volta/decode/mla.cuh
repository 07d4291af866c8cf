// Main loop of MLA decoding (multi-head latent attention): one KV head, all query heads of a sequence are rows. The cache holds
// latents of HEADDIM columns (576), whose first HEADDIM_V (512) are also the values; the last 64 are the rotary part. (Sparse MLA
// also has kernels of 512 columns, without a rotary part.) decode::Block (decode/block.cuh) calls run() for each work tile: up to
// BLOCK_ROWS query rows of a sequence and a range of its tokens. Kernels of volta_fa::fwd_mla and fwd_sparse_mla.
//
// A step is 16 tokens, which all warps of the block share. Each thread loads its part of the next step's latents while this step is
// computed, and stores it to shared memory as fp16, whatever the format. So a latent is read from global memory once.
//
// Four warps split the columns of K and of the output; further warps have other rows. A step has three phases, with
// __syncthreads() before each and after the last:
//   1. Scores. A warp multiplies its columns. Its quad-pairs (volta/mma.cuh) are 2 row tiles of 8 x 2 halves of the columns.
//      A shuffle adds the halves; shared memory collects the partial sums of the four warps.
//   2. Softmax. Each thread sums a few scores of one row, applies mask and softmax, and stores probabilities as fp16. The row
//      maximum is lazy: it moves, and the output is rescaled, only when a score exceeds SoftmaxRow::limit (softmax.cuh).
//   3. Output. All warps multiply the probabilities by their columns of the values.
//
// What the tokens are, and who loads them, is a policy: CacheTokens are those of a sequence's pages or entry. SparseTokens
// (volta/decode/sparse_mla.cuh) are the ones that a query chose.
//
//   g, i, mt, j, e    an operand (16 columns of Q and K); a pair of row tiles; a row tile of the output (8 rows); 64 columns of
//                     values; a lane's element (0 to 7) of an accumulator
//   t, quad, half     the lane's number in its quad-pair, t = quad + 4 * half (0 to 7); lane % 4; lane / 16
//   qm, qn            bits 2 and 3 of the lane, its quad-pair: in the scores the half of the columns, and the row tile of 8
//   s                 the work tile: `rows` packed rows (row r: query r / nheads, head r % nheads) from `row` on, and tokens
//                     `first` to end - 1 of batch entry `batch`
//   kScale            (of KeyElement) staged latents are this times the numbers that codes stand for
//   CacheUnit         what cache pointers and strides count: a column, of 2 bytes, or of 1 byte in a quantized cache
//   BLOCK_ROWS, THREADS, BLOCKS_PER_SM, STEP  the kernel's row in src/kernels: query rows and threads of a block; blocks that an
//                     SM has room for; rows of output that shared memory holds at a time
#pragma once

#include "decode/block.cuh"  // Block; WorkTile, RowInfo (a row's position), SharedPartials
#include "decode/cache_registers.cuh"  // KeyElement: the cache's number format
#include "decode/page_iterator.cuh"
#include "decode/scales.cuh"  // ProbabilityScale; quantized.cuh: scale_of_page(), scale_of_sequence(): scales in memory
#include "volta/mma.cuh"

namespace volta {

// The policy for tokens of a sequence. A policy has
//
//   kTokenScales    each token has a scale, by which its staged latent must be multiplied
//   kScales         tokens or sequences have one
//   kNanIsInfinity  a NaN code is staged as infinity: x + 0 * x makes results NaN
//   kRowScales      scores of a row have a factor, row_scale()
//   kMaxLogits      the largest score of each row is wanted, by write_max_logit()
//   Loader          loads steps of tokens and stages them in shared memory, as LatentLoader of MlaMainloop does
struct CacheTokens {
    static constexpr bool kTokenScales = decode::kTokenScales, kScales = decode::kQuantized,
                          kNanIsInfinity = decode::KeyElement::kNanIsInfinity, kRowScales = false, kMaxLogits = false;
    template <class Mainloop>
    using Loader = typename Mainloop::LatentLoader;
};

// Warps: warps of a block, a multiple of four.
template <int Warps, class Tokens = CacheTokens>
class MlaMainloop {
    friend Tokens;
    static constexpr int kTokens = 16, kColumnWarps = 4, kRowWarps = Warps / kColumnWarps, kWarpRows = BLOCK_ROWS / kRowWarps;
    static constexpr int kWarpColumns = HEADDIM_V / kColumnWarps, kRotary = HEADDIM - HEADDIM_V;
    static constexpr int kRowPairs = kWarpRows / 16, kOutputTiles = kWarpRows / 8;  // of a warp: 16 rows for scores, 8 for output
    static constexpr int kLoads = kWarpColumns / 64;  // a warp's shared loads of values: 64 columns of four tokens each
    static_assert(Warps * 32 == THREADS && kRowPairs * 16 * kRowWarps == BLOCK_ROWS, "the warps cover BLOCK_ROWS rows");
    static_assert(kWarpColumns % 64 == 0 && kRotary % (16 * kColumnWarps) == 0 && kRotary <= 16 * kColumnWarps,
                  "whole operands of a warp");

    // Operands of the scores: 16 columns each; the last one is the rotary part, if there is one. Registers hold as many operands of
    // Q as they have room for. The others lie in shared memory, where only their lane reads them.
    static constexpr int kColumnOperands = kWarpColumns / 16, kOperands = kColumnOperands + kRotary / (16 * kColumnWarps);
    static constexpr int kRegisterOperands = kRowPairs > 1       ? 2
                                             : BLOCKS_PER_SM > 2 ? 5
                                                                 : kOperands,
                         kSharedOperands = kOperands - kRegisterOperands;
    // Bytes between tokens in shared memory: 16 more than the columns, so that a quad-pair's operands of four tokens lie in
    // other banks than those of its neighbor, 64 bytes further.
    static constexpr int kPitch = 2 * HEADDIM + 16;
    // kTokenThreads threads load one token: each kChunkLoads times 16 bytes (kChunk columns) of the first HEADDIM_V columns, then
    // kRotaryColumns columns of the rotary part in one load. kRotaryWords and kWords: 32-bit words of that load, and of all.
    static constexpr int kTokenThreads = THREADS / kTokens, kChunk = 16 / sizeof(decode::CacheUnit);
    static constexpr int kChunkLoads = HEADDIM_V / kChunk / kTokenThreads, kRotaryColumns = kRotary / kTokenThreads;
    static constexpr int kRotaryWords = kRotaryColumns * sizeof(decode::CacheUnit) / 4, kWords = 4 * kChunkLoads + kRotaryWords;
    // Whether to prefetch the step after the next into L2: where the steps of all blocks are too few bytes for the memory
    // latency. Not where the conversion of codes leaves no room for it in the instruction cache.
    static constexpr bool kPrefetches = decode::kQuantized ? kRowPairs == 1 : Warps > kColumnWarps;
    // Scores of a step that a thread has in the softmax, and threads (neighboring lanes) that share a row.
    static constexpr int kThreadScores = BLOCK_ROWS * kTokens / THREADS, kRowThreads = kTokens / kThreadScores;
    static_assert(kThreadScores == 2 || kThreadScores == 4, "a thread's loads of scores");
    struct alignas(4 * kThreadScores) ThreadScores {
        float x[kThreadScores];
    };
    struct alignas(2 * kThreadScores) PackedScores {
        unsigned x[kThreadScores / 2];
    };

    // Shared memory during the loop.
    struct Shared {
        uint4 latents[kTokens * kPitch / sizeof(uint4)];
        float scores[kColumnWarps][BLOCK_ROWS][kTokens];  // partial sums, one for each of the four warps
        unsigned short probabilities[BLOCK_ROWS][kTokens];
        float factors[BLOCK_ROWS];  // by which the step rescales output rows
        float scales[kTokens];  // kTokenScales
        uint4 queries[kSharedOperands > 0 ? Warps * kSharedOperands * kRowPairs : 1][32];  // of each warp its own
    };

    // A warp's output: row tiles of 8, by 64 columns, by halves (four columns) of a lane's chunk of values.
    using Output = Accumulator[kOutputTiles][kLoads][2];

    // Returns threadIdx.x, hidden from the compiler, which would otherwise recompute what follows from it in the loop.
    __device__ __forceinline__ static int kept_thread() {
        int thread = threadIdx.x;
        make_opaque(thread);
        return thread;
    }
    // The lane's and warp's coordinates. Recomputed for each work tile, because they would hold registers everywhere.
    struct WarpCoord : Lane {
        int warp, first_row, column_warp;

        __device__ __forceinline__ WarpCoord() : Lane(kept_thread() & 31), warp(__shfl_sync(~0u, threadIdx.x >> 5, 0)) {
            first_row = warp / kColumnWarps * kWarpRows;
            column_warp = warp % kColumnWarps;
        }
        // First column of the lane's operands. Quad-pairs of the other half have columns 32 further.
        __device__ __forceinline__ int first_column() const { return kWarpColumns * column_warp + 32 * qm; }
        __device__ __forceinline__ int rotary_column() const { return HEADDIM_V + 8 * column_warp + 32 * qm; }
        // The lane's chunk (of eight) in 64 columns of values.
        __device__ __forceinline__ int value_chunk(int half) const { return 4 * qm + 2 * half + qn; }
    };
    // Column of the lane's chunk of operand g, from first_column().
    __device__ __forceinline__ static constexpr int operand_column(int g) { return 64 * (g / 4) + 8 * (g % 4); }

    // Loads Q, the first operands to shared memory, the others to registers; zeros for rows that do not exist.
    __device__ __forceinline__ static void load_queries(const DecodeParams& p, const decode::WorkTile& s, const WarpCoord& lane,
                                                        Shared& shared, uint4 (&in_registers)[kRegisterOperands][kRowPairs]) {
        const int group = p.problem.nheads;  // query heads of the one KV head: rows of a query
#pragma unroll
        for (int i = 0; i < kRowPairs; i++) {
            const int row = lane.first_row + 16 * i + 8 * lane.qn + lane.t, packed = s.row + row;
            const bool exists = row < s.rows;
            const unsigned short* from = p.q.ptr + s.batch * p.q.batch_stride + (s.q_offset + packed / group) * p.q.row_stride +
                                         packed % group * p.q.head_stride;
            uint4 x[kOperands];
#pragma unroll
            for (int g = 0; g < kOperands; g++) {
                x[g] = make_uint4(0, 0, 0, 0);
                if (exists)
                    x[g] =
                        load_global(from + (g == kColumnOperands ? lane.rotary_column() : lane.first_column() + operand_column(g)));
            }
#pragma unroll
            for (int g = 0; g < kOperands; g++) {
                x[g] = flipped(x[g], p.problem.sign_flip);  // a negative softmax_scale flips the signs of Q
                if (g < kSharedOperands)
                    shared.queries[(lane.warp * kSharedOperands + g) * kRowPairs + i][lane.lane] = x[g];
                else
                    in_registers[g - kSharedOperands][i] = x[g];
            }
        }
    }

    // The thread's part of the next step's latents, in registers. PageIterator has the step's page: number() in the cache, and row
    // `row` of the step's first token in it; advance() returns true on entering a new page. unpack8() turns eight codes into fp16.
    class LatentLoader {
        decode::PageIterator pages_;
        const decode::CacheUnit* from_;  // of this thread
        int page_valid_ = 1;  // 0 after a block-table entry outside the cache
        unsigned words_[kWords] = {};
        float token_scale_ = 0.f;  // scale of the token, in the thread that has its first chunk

        __device__ __forceinline__ static int token() { return threadIdx.x / kTokenThreads; }
        __device__ __forceinline__ static int chunk() { return threadIdx.x % kTokenThreads; }

        __device__ __forceinline__ void enter_page(const DecodeParams& p) {
            const int page = pages_.number();
            page_valid_ &= has_page(p.cache, page);
            from_ = reinterpret_cast<const decode::CacheUnit*>(p.cache.k.ptr) + page * p.cache.k.batch_stride +
                    token() * p.cache.k.row_stride + chunk() * kChunk;
        }

    public:
        __device__ __forceinline__ LatentLoader(const DecodeParams& p, const decode::WorkTile& s, int first) : pages_(p, s, first) {
            enter_page(p);
            from_ += pages_.row * p.cache.k.row_stride;
        }
        __device__ __forceinline__ bool page_valid() const { return page_valid_ != 0; }
        // Loads the step from token `first` on; zeros for missing tokens. load_columns<0, n>(columns, to, from) loads n
        // 32-bit words if columns > 0; here they exist always, so columns is 1.
        __device__ __forceinline__ void load(const DecodeParams& p, int first, int end) {
            int exists = page_valid_;
            if (first + kTokens > end) {
#pragma unroll
                for (unsigned& x : words_) x = 0;
                exists &= first + token() < end;
            }
            if (exists) {
#pragma unroll
                for (int i = 0; i < kChunkLoads; i++) load_columns<0, 4>(1, words_ + 4 * i, from_ + i * kTokenThreads * kChunk);
                // rotary part; from_ includes chunk() * kChunk columns
                load_columns<0, kRotaryWords>(1, words_ + 4 * kChunkLoads, from_ + HEADDIM_V + chunk() * (kRotaryColumns - kChunk));
            }
            if constexpr (decode::kTokenScales) {
                const bool has_scale = exists && chunk() == 0;  // the 0 below: the one KV head
                token_scale_ = load_float_or_0(has_scale, scale_of_page(p.scales.k, pages_.number(), pages_.row + token(), 0));
            }
        }
        // Prefetches the step at token `next`, the one after that being loaded, into L2. It may touch rows of a page that hold
        // no token. (ptxas would remove a load whose result is unused, even a volatile one.)
        __device__ __forceinline__ void prefetch_next(const DecodeParams& p, int next, int end) const {
            constexpr int kSector = 32 / sizeof(decode::CacheUnit), kSectors = HEADDIM / kSector;
            const decode::CacheUnit* from;
            int exists;
            if (pages_.row + kTokens < p.cache.rows) {
                from = from_ + kTokens * p.cache.k.row_stride + chunk() * (kSector - kChunk);
                exists = page_valid_ & (pages_.row + kTokens + token() < p.cache.rows);
            } else {
                const int page = pages_.next_number();
                from = reinterpret_cast<const decode::CacheUnit*>(p.cache.k.ptr) + page * p.cache.k.batch_stride +
                       token() * p.cache.k.row_stride + chunk() * kSector;
                exists = has_page(p.cache, page) && next < end;
            }
#pragma unroll
            for (int i = 0; i < kSectors; i += kTokenThreads) prefetch_l2_if(exists && i + chunk() < kSectors, from + i * kSector);
        }
        __device__ __forceinline__ void advance(const DecodeParams& p, const decode::WorkTile& s) {
            from_ += kTokens * p.cache.k.row_stride;
            if (pages_.template advance<kTokens>(p, s)) enter_page(p);
        }
        // Stores the loaded latents to shared memory as fp16.
        __device__ __forceinline__ void stage(Shared& shared) const {
            char* to = reinterpret_cast<char*>(shared.latents) + token() * kPitch;
#pragma unroll
            for (int i = 0; i < kChunkLoads; i++) {
                uint4* at = reinterpret_cast<uint4*>(to + 2 * (chunk() + i * kTokenThreads) * kChunk);
                at[0] = decode::KeyElement::unpack8(words_ + 4 * i);
                if constexpr (decode::kQuantized) at[1] = decode::KeyElement::unpack8(words_ + 4 * i + 2);
            }
            const unsigned* last = words_ + 4 * kChunkLoads;
            void* at = to + 2 * (HEADDIM_V + chunk() * kRotaryColumns);
            if constexpr (kRotaryColumns == 8) {
                *static_cast<uint4*>(at) = decode::KeyElement::unpack8(last);
            } else {
                const unsigned words[4] = {last[0], kRotaryWords > 1 ? last[kRotaryWords - 1] : 0};
                const uint4 x = decode::KeyElement::unpack8(words);
                *static_cast<uint2*>(at) = make_uint2(x.x, x.y);
            }
            if (decode::kTokenScales && chunk() == 0) shared.scales[token()] = token_scale_;
        }
    };

    using Loader = typename Tokens::template Loader<MlaMainloop>;
    friend Loader;

    // Multiplies output rows by their factors. `factors` has one for each of BLOCK_ROWS rows.
    __device__ __forceinline__ static void rescale(const WarpCoord& lane, const float* factors, Output& o) {
        const float* row_factors = factors + lane.first_row + (lane.t & 1) + 4 * lane.half;
#pragma unroll
        for (int mt = 0; mt < kOutputTiles; mt++) {
            const float factor[2] = {row_factors[8 * mt], row_factors[8 * mt + 2]};
            unrolled<kLoads, 2, 8>([&](int j, int i, int e) { o[mt][j][i][e] *= factor[(e >> 1) & 1]; });
        }
    }

public:
    static constexpr int kTokenGroups = 1;  // groups of warps that split the tokens of a work tile: all warps share each step
    // Rows of output that shared memory holds at a time: STEP of the kernel's row (not tokens of a step, which are kTokens).
    static constexpr int kRowsAtOnce = STEP;
    // Shared memory of the loop, bytes; without `queries` if none are there. The outputs that run() leaves take its place.
    static constexpr int kWorkBytes = sizeof(Shared) - (kSharedOperands > 0 ? 0 : sizeof(Shared::queries));

    // Computes work tile s. row_info: position of each row's query among the keys. Leaves each row's softmax state and, kRowsAtOnce
    // rows at a time, the outputs in `partials` (rows kPartialStride floats apart); calls finish(first row) after each such part.
    template <class Finish>
    __device__ __forceinline__ static void run(const DecodeParams& p, const decode::WorkTile& s, const decode::RowInfo* row_info,
                                               const decode::SharedPartials<kTokenGroups, kRowsAtOnce>& partials, Finish finish) {
        const WarpCoord lane;
        Shared& shared = *reinterpret_cast<Shared*>(partials.output);
        const float scale_log2 = p.problem.scale_log2;
        // The sequence's scale (fp8; 0: the one KV head), divided by kScale. Tokens' scales are not: int8's kScale is 1, and
        // SparseTokens have divided theirs.
        const float key_scale =
            Tokens::kScales && !Tokens::kTokenScales ? scale_of_sequence(p.scales.k, s.batch, 0) / decode::KeyElement::kScale : 1.f;

        // The thread's scores in the softmax: neighboring tokens, from own_token on, of own_row. In rows 8 to 15 of every 16,
        // groups of four tokens trade places, so that a warp's stores lie in different banks.
        const int thread = kept_thread();
        const int own_row = thread / kRowThreads, own_token = thread % kRowThreads * kThreadScores ^ ((own_row >> 3 & 1) * 4);

        Output o = {};
        SoftmaxRow softmax;
        decode::ProbabilityScale probability_scale;
        bool has_invalid_page = false;
        float row_scale = 1.f, max_score = negative_infinity();
        if constexpr (Tokens::kRowScales) row_scale = Tokens::row_scale(p, s, own_row);

        const int begin = s.first, end = s.end;
        if (begin < end) {
            // The row sees tokens [visible, visible + count), counted from own_token.
            const int position = row_info[own_row].position;
            const int visible = max(position - p.problem.window_left, begin) - own_token;
            const int count = max(min(position + p.problem.window_right + 1, end) - own_token - visible, 0);
            int token = begin / kTokens * kTokens;

            Loader loader(p, s, token);
            loader.load(p, token, end);
            // After the latents: their loads had to wait for the block table.
            uint4 q[kRegisterOperands][kRowPairs];
            load_queries(p, s, lane, shared, q);
            // The lane's offsets in shared memory: bytes in latents (keys, values), floats in scores (score_at).
            const int key_at = lane.t * kPitch + 2 * lane.first_column();
            // keys[0]: the eight tokens whose sums the lane keeps; keys[1]: the others, whose sums go to lane ^ 4, of the other qm
            int keys[2] = {key_at + 8 * kPitch * lane.qm, key_at + 8 * kPitch * (lane.qm ^ 1)};
            const int to_rotary = 2 * (lane.rotary_column() - lane.first_column());
            int values = lane.quad * kPitch + 2 * (kWarpColumns * lane.column_warp + 8 * lane.value_chunk(lane.half));
            const int score_row = lane.first_row + 8 * lane.qn + (lane.t & 1) + 4 * lane.half;
            int score_at = (lane.column_warp * BLOCK_ROWS + score_row) * kTokens + ((8 * lane.qm + (lane.t & 2)) ^ (4 * lane.qn));
            make_opaque(keys[0]), make_opaque(keys[1]), make_opaque(values);
            const auto latents = [&](int offset) {
                return *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(shared.latents) + offset);
            };

#pragma unroll 1
            for (; token < end; token += kTokens) {
                loader.stage(shared);
                if (token + kTokens < end) {
                    loader.advance(p, s);
                    if (kPrefetches) loader.prefetch_next(p, token + 2 * kTokens, end);
                    loader.load(p, token + kTokens, end);
                }
                __syncthreads();
                {  // phase 1: scores
                    Accumulator c[kRowPairs][2] = {};
#pragma unroll
                    for (int g = 0; g < kOperands; g++) {
                        const int offset = g == kColumnOperands ? to_rotary : 2 * operand_column(g);
                        const uint4 b[2] = {latents(keys[0] + offset), latents(keys[1] + offset)};
#pragma unroll
                        for (int i = 0; i < kRowPairs; i++) {
                            const uint4 a = g < kSharedOperands
                                                ? shared.queries[(lane.warp * kSharedOperands + g) * kRowPairs + i][lane.lane]
                                                : q[g < kSharedOperands ? 0 : g - kSharedOperands][i];
#pragma unroll
                            for (int n = 0; n < 2; n++) mma_row_col(c[i][n], a.x, a.y, b[n].x, b[n].y);
#pragma unroll
                            for (int n = 0; n < 2; n++) mma_row_col(c[i][n], a.z, a.w, b[n].z, b[n].w);
                        }
                    }
                    float* to = shared.scores[0][0];
#pragma unroll
                    for (int i = 0; i < kRowPairs; i++) {
                        float sum[8];
#pragma unroll
                        for (int e = 0; e < 8; e++) sum[e] = c[i][0][e] + __shfl_xor_sync(~0u, c[i][1][e], 4);
#pragma unroll
                        for (int e = 0; e < 8; e += 2)
                            *reinterpret_cast<float2*>(to + (score_at ^ (e & 4)) + (16 * i + (e & 2)) * kTokens) =
                                make_float2(sum[e], sum[e + 1]);
                    }
                }
                __syncthreads();

                // phase 2: softmax. x: the thread's scores, then probabilities, then these times token scales in the row's unit
                float x[kThreadScores] = {}, scale[kThreadScores];
#pragma unroll
                for (int i = 0; i < kThreadScores; i++) scale[i] = Tokens::kTokenScales ? shared.scales[own_token + i] : key_scale;
#pragma unroll
                for (int w = 0; w < kColumnWarps; w++) {
                    const ThreadScores y = reinterpret_cast<const ThreadScores*>(shared.scores[w])[thread];
#pragma unroll
                    for (int i = 0; i < kThreadScores; i++) x[i] += y.x[i];
                }
#pragma unroll
                for (int i = 0; i < kThreadScores; i++) {
                    if constexpr (Tokens::kNanIsInfinity) x[i] = fmaf(x[i], 0.f, x[i]);
                    if constexpr (Tokens::kScales) x[i] *= Tokens::kRowScales ? scale[i] * row_scale : scale[i];
                }
#pragma unroll
                for (int i = 0; i < kThreadScores; i++)
                    if (static_cast<unsigned>(token + i - visible) >= static_cast<unsigned>(count)) x[i] = negative_infinity();
                float largest = x[0];
#pragma unroll
                for (int i = 1; i < kThreadScores; i++) largest = fmaxf(largest, x[i]);
                if constexpr (Tokens::kMaxLogits) max_score = fmaxf(max_score, largest);
                bool moved = __any_sync(~0u, largest > softmax.limit);  // a score above `limit` moves the lazy row maximum
                float factor = 1.f;
                // Whether this row's own scores move its maximum or unit. Used in batch-invariant kernels (kBatchInvariant), where
                // a row's bits must not depend on other rows.
                [[maybe_unused]] bool own_moved = false;
                if (moved) {
#pragma unroll
                    for (int n = 1; n < kRowThreads; n *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, n));
                    own_moved = largest > softmax.limit;
                    // kMovedRows: all rows, in batch-invariant kernels those above their limit. `factor`: for the row's output
                    factor = softmax.template update_row_max<kMovedRows>(largest, scale_log2, 1.f / scale_log2);
                }
#pragma unroll
                for (int i = 0; i < kThreadScores; i++) x[i] = softmax.probability(x[i], scale_log2);
                if constexpr (Tokens::kTokenScales) {
                    // Token scales multiply probabilities, because P V mixes tokens. The products are packed in a unit of the row,
                    // a power of two (ProbabilityScale), where a probability of 1 counts as kPackedOne, 2^8. exceeds(): one does
                    // not fit fp16. update() then sets the unit by the row's largest, and returns the factor for its output.
                    float2 product[kThreadScores / 2];
                    bool exceeds = moved;
#pragma unroll
                    for (int i = 0; i < kThreadScores; i += 2) {
                        product[i / 2] = probability_scale.scaled(make_float2(x[i], x[i + 1]), make_float2(scale[i], scale[i + 1]));
                        exceeds |= decode::ProbabilityScale::exceeds(product[i / 2]);
                    }
                    moved = __any_sync(~0u, exceeds);
                    if (moved) {
                        float m = 0.f;
                        if constexpr (kBatchInvariant) {
#pragma unroll
                            for (int i = 0; i < kThreadScores / 2; i++) own_moved |= decode::ProbabilityScale::exceeds(product[i]);
#pragma unroll
                            for (int n = 1; n < kRowThreads; n *= 2) own_moved |= __shfl_xor_sync(~0u, int(own_moved), n) != 0;
                        }
#pragma unroll
                        for (int i = 0; i < kThreadScores; i++) m = fmaxf(m, x[i] * kPackedOne * scale[i]);
#pragma unroll
                        for (int n = 1; n < kRowThreads; n *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, n));
                        if (!kBatchInvariant || own_moved) factor *= probability_scale.update(m);
#pragma unroll
                        for (int i = 0; i < kThreadScores; i += 2) {
                            product[i / 2] =
                                probability_scale.scaled(make_float2(x[i], x[i + 1]), make_float2(scale[i], scale[i + 1]));
                            // with a negative or non-finite scale, which exceeds every unit
                            if (decode::ProbabilityScale::exceeds(product[i / 2])) softmax.sum = quiet_nan();
                        }
                    }
#pragma unroll
                    for (int i = 0; i < kThreadScores; i += 2) x[i] = product[i / 2].x, x[i + 1] = product[i / 2].y;
                }
                PackedScores packed;
#pragma unroll
                for (int i = 0; i < kThreadScores; i += 2)
                    packed.x[i / 2] = Tokens::kTokenScales ? pack_shifted(x[i], x[i + 1]) : pack_probabilities(x[i], x[i + 1]);
                *reinterpret_cast<PackedScores*>(&shared.probabilities[own_row][own_token]) = packed;
                shared.factors[own_row] = factor;  // other warps need the factors of these rows if any has moved
                if (__syncthreads_or(moved)) rescale(lane, shared.factors, o);

                // phase 3: output
#pragma unroll 1
                for (int k = 0; k < kTokens; k += 4) {
                    uint2 a[kOutputTiles];
#pragma unroll
                    for (int mt = 0; mt < kOutputTiles; mt++)
                        a[mt] = *reinterpret_cast<const uint2*>(&shared.probabilities[lane.first_row + 8 * mt + lane.t][k]);
#pragma unroll
                    for (int j = 0; j < kLoads; j++) {
                        const uint4 v = latents(values + k * kPitch + 128 * j);
#pragma unroll
                        for (int mt = 0; mt < kOutputTiles; mt++) {
                            mma_row_row(o[mt][j][0], a[mt].x, a[mt].y, v.x, v.y);
                            mma_row_row(o[mt][j][1], a[mt].x, a[mt].y, v.z, v.w);
                        }
                    }
                }
                __syncthreads();
            }
            has_invalid_page = !loader.page_valid();
        }

        float sum = softmax.sum;
#pragma unroll
        for (int n = 1; n < kRowThreads; n *= 2) sum += __shfl_xor_sync(~0u, sum, n);
        if (has_invalid_page) sum = quiet_nan();
        if constexpr (Tokens::kMaxLogits) {
#pragma unroll
            for (int n = 1; n < kRowThreads; n *= 2) max_score = fmaxf(max_score, __shfl_xor_sync(~0u, max_score, n));
            if (thread % kRowThreads == 0) Tokens::write_max_logit(p, s, own_row, max_score);
        }
        const WarpCoord last;  // recomputed, so that the loop has the registers
        const int last_thread = kept_thread(), last_row = last_thread / kRowThreads;
        if (last_thread % kRowThreads == 0) {
            partials.state[last_row] = {softmax.row_max, sum};
            if constexpr (Tokens::kScales)
                shared.factors[last_row] = Tokens::kTokenScales ? 1.f / probability_scale.inverse : key_scale;
        }
        if constexpr (Tokens::kScales) {
            __syncthreads();
            finish_values(last, shared.factors, o);
            __syncthreads();
        }
#pragma unroll 1
        for (int first = 0; first < BLOCK_ROWS; first += kRowsAtOnce) {
            write_output(last, o, first, partials.output);
            finish(first);
        }
    }

private:
    // Ends the output's scales: a NaN code's infinity becomes NaN, and factors undo the row's unit or apply the sequence's scale.
    __device__ __forceinline__ static void finish_values(const WarpCoord& lane, const float* factors, Output& o) {
        if constexpr (Tokens::kNanIsInfinity) {
#pragma unroll
            for (auto& x : o)
#pragma unroll
                for (auto& y : x)
#pragma unroll
                    for (auto& z : y)
#pragma unroll
                        for (float& w : z) w = fmaf(w, 0.f, w);
        }
        rescale(lane, factors, o);
    }
    // Stores the output of rows `first` to first + kRowsAtOnce - 1 to shared memory.
    __device__ __forceinline__ static void write_output(const WarpCoord& lane, const Output& o, int first, float* to) {
#pragma unroll
        for (int mt = 0; mt < kOutputTiles; mt++) {
            const int row = lane.first_row + 8 * mt - first;
            if (static_cast<unsigned>(row) >= kRowsAtOnce) continue;
            float* own =
                to + (row + (lane.t & 1) + 4 * lane.half) * decode::kPartialStride + kWarpColumns * lane.column_warp + (lane.t & 2);
#pragma unroll
            for (int j = 0; j < kLoads; j++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int e = 0; e < 8; e += 2)
                        *reinterpret_cast<float2*>(own + (e & 2) * decode::kPartialStride + 64 * j + 8 * lane.value_chunk(e >> 2) +
                                                   4 * i) = make_float2(o[mt][j][i][e], o[mt][j][i][e + 1]);
        }
    }
};

}  // namespace volta
