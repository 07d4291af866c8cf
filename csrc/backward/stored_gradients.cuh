// Second main kernel of the backward pass for large headdims (volta: above 192, turing: above 256), and for fp32 tensors: computes
// dK, dV and dQ from the P and dS that the first, store_scores.cuh, has stored in scratch memory. (One kernel for all would have to
// keep dK, dV and their operands in an SM, where they do not fit, or only with slow code.) To bound the memory a launch has only
// some KV heads and keys. A block computes 128 rows (kStagedRows) of one gradient, by 128 columns, or by 64 if no gradient has more
// (kStagedColumns; the block has as many threads, kStagedThreads):
//
//   dV = P^T dO      dK = dS^T Q      over all queries of a KV head, in steps of 32
//   dQ += dS K       over the keys of the launch, in steps of 32
//
// No other block adds to these elements, so dQ, dK and dV are deterministic. If a launch lacks keys of a head, the sums of dQ stay
// in fp32 memory (StoredScores::dq_sums) for the next launch.
//
// A Family (store_scores.cuh) also has, for a warp's 64 rows and 64 columns of a gradient
//   KeySums, QuerySums             a lane's 128 accumulators: of dK or dV, and of dQ
//   key_a, key_b                   offset in its tile of shared memory, bytes, of the lane's part of operand A (P^T or dS^T), from
//                                  the warp's first row on, and of B (dO or Q), from the warp's first column on
//   query_a, query_b               the same of dS and K
//   kLoadParts                     in how many parts the loads of a step come, with Split: the number that spills least
//   multiply_keys, multiply_queries  add the products of a step to c, from the shared addresses of these operands
//   add_keys, add_queries          the same for part number `part` of kLoadParts equal parts of c, by sums that begin with 0 and
//                                  are multiplied by a factor
//   for_each_pair(c, f)            calls f(row, column, x, y) for each two neighbors of a row
//
// Split (fp32 tensors): operands, P and dS are sums of two fp16 numbers, a high and a low part. A step of 32 terms comes three
// times: low * high, high * low and high * high. A stored tile has kStoredElements high parts, then as many low parts; a row of Q,
// K or dO has its low parts after its columns of high parts. dS of each 64 keys by 64 queries is stored divided by a power of two,
// its unit; the four units of a tile begin at kStoredUnits.
//
//   terms                the kStagedTerms (32) values, in a step, of the index that a product sums: queries or keys
//   TermColumns          an operand's tile whose columns are terms; TermRows, OtherTermRows: whose rows are, of A and of B
//   SHARED_BYTES         from the row in src/kernels: two buffers of both operands, B kStagedTile bytes after A
//   stored tile          kStoredRows (128) keys by 128 queries
//   StoredScores         a launch's KV heads (first_head, heads), key tiles (first_key_tile, key_tiles); query_tiles of a head
//   is_first, is_last    the launch has the heads' first key tiles: sums of dQ begin with 0; their last: dQ is complete
//
// Sparse (Split with a block mask): steps visit only those half tiles (64 terms of a stored tile) that have scores. Those whose
// unit is kAbsentUnit have none.
#pragma once

#include "backward/gradient_output.cuh"  // gradients_are_fp32(), store_gradient2(): output dtype
#include "backward/iteration_range.cuh"  // KeyRange: keys that a block of queries sees
#include "backward/probabilities.cuh"  // kProbabilityUnit
#include "backward/stored_scores.cuh"  // stored_tile(): offset of a tile; StoredScores, BwdParams (src/params)
#include "backward/staged_tiles.cuh"  // StagedTile, staged_steps(): operands through shared memory; rows_of(): address of a row

template <class Family, bool Split = false, bool Sparse = false>
struct BackwardGradients {
    static_assert(Split || !Sparse, "units say which tiles have scores");
    static_assert(SHARED_BYTES >= kStagedRows * kStagedColumns * 2, "the output is staged in the buffers");
    using KeySums = typename Family::KeySums;
    using QuerySums = typename Family::QuerySums;
    using Lane = typename Family::Layout::Lane;
    static constexpr int kLaneSums = 128;
    static_assert(sizeof(KeySums) == 4 * kLaneSums && sizeof(QuerySums) == 4 * kLaneSums, "64 by 64 of a warp");

    static __device__ __forceinline__ int warp_row() { return 64 * (threadIdx.x / 32 % 2); }
    static __device__ __forceinline__ int warp_column() { return threadIdx.x / 64 * 64; }
    static __device__ __forceinline__ int column_tiles_of(int headdim) { return (headdim + kStagedColumns - 1) / kStagedColumns; }

    // Returns a or b, by a select instruction. (For `first ? a : b` ptxas may index constant memory, which the GPU simulator
    // lacks.)
    template <class T>
    static __device__ __forceinline__ T either(bool first, T a, T b) {
        T selected;
        asm("{.reg .pred p; setp.ne.s32 p, %3, 0; selp.b64 %0, %1, %2, p;}"
            : "=l"(selected)
            : "l"(a), "l"(b), "r"(static_cast<int>(first)));
        return selected;
    }
    // The same for all members of an Operand or Output: address and strides, in elements.
    template <class T>
    static __device__ __forceinline__ T choose(bool first, const T& a, const T& b) {
        return {either(first, a.ptr, b.ptr), either(first, a.batch_stride, b.batch_stride),
                either(first, a.row_stride, b.row_stride), either(first, a.head_stride, b.head_stride)};
    }
    static constexpr int kProducts = Split ? 3 : 1;
    // A step's loads come in kParts parts, each before its part of the products. With Split, registers also hold the step's own
    // sums, and lack room for all loads at once.
    static constexpr int kParts = Split ? Family::kLoadParts : 1;
    // Which of a step's products comes next, in the order above; 2, high * high, ends the step. a() and b() are the offsets, in
    // elements, of that part of A and B. `low`: offset of B's low parts.
    struct Product {
        int number = 0;
        __device__ __forceinline__ int a() const { return Split && number == 0 ? kStoredElements : 0; }
        __device__ __forceinline__ int b(int low) const { return Split && number == 1 ? low : 0; }
        // Returns whether the step is complete.
        __device__ __forceinline__ bool advance() {
            if (!Split) return true;
            number = number == 2 ? 0 : number + 1;
            return number == 0;
        }
    };
    // The unit of a step's dS. The next step is loaded before this one multiplies, so there are two: `loaded` is that of the last
    // load, `value` that of the step in shared memory.
    struct Unit {
        float loaded = 1.f, value = 1.f;
        // `tile`: address of dS's tile. `key`, `query`: a key and a query of the step, in the tile.
        __device__ __forceinline__ void load(const unsigned short* tile, int key, int query) {
            if (Split) loaded = reinterpret_cast<const float*>(tile + kStoredUnits)[key / 64 * 2 + query / 64];
        }
        __device__ __forceinline__ void step() { value = loaded; }
    };

    // Iterates over those of a sequence of half tiles that have scores. has_scores(i) returns whether half tile i has some. All
    // lanes of a warp call these functions together: each tests one of 32 half tiles.
    class PresentHalves {
        unsigned found_ = 0;  // bit i: half tile next_ - 32 + i has scores, and was not taken yet
        int next_ = 0;

    public:
        template <class HasScores>
        static __device__ __forceinline__ int count(int all, HasScores has_scores) {
            int present = 0;
            for (int first = 0; first < all; first += 32) {
                const int i = first + static_cast<int>(threadIdx.x % 32);
                present += __popc(__ballot_sync(~0u, i < all && has_scores(i)));
            }
            return present;
        }
        // Returns the number of the next half tile with scores, which must exist.
        template <class HasScores>
        __device__ __forceinline__ int take(int all, HasScores has_scores) {
            while (!found_) {
                const int i = next_ + static_cast<int>(threadIdx.x % 32);
                found_ = __ballot_sync(~0u, i < all && has_scores(i));
                next_ += 32;
            }
            const int i = next_ - 32 + __ffs(found_) - 1;
            found_ &= found_ - 1;
            return i;
        }
    };
    static constexpr int kHalf = kStoredRows / 2, kHalfSteps = kHalf / kStagedTerms;  // terms, and steps, of a half tile
    static __device__ __forceinline__ const float* units_of(const StoredScores& stored, long long tile) {
        return reinterpret_cast<const float*>(stored.ds + tile + kStoredUnits);
    }

    // Stores the block's sums, times `factor`, to an output, where `first` is the address of the block's first row and column. From
    // there on `rows` rows and `columns` columns exist. fp16 goes by shared memory, so that a thread stores a whole chunk (kChunk
    // elements, 16 bytes).
    template <class Sums>
    static __device__ __forceinline__ void to_output(const Sums& c, const BwdParams& p, float factor, unsigned shared,
                                                     const Output& out, unsigned short* first, int rows, int columns) {
        const int first_row = warp_row(), first_column = warp_column();
        if (gradients_are_fp32(p)) {
            float* fp32 = fp32_element(out, first) + first_row * out.row_stride + first_column;
            rows -= first_row, columns -= first_column;
            Family::for_each_pair(c, [&](int row, int column, float x, float y) {
                if (row < rows && column < columns) store_gradient2(fp32 + row * out.row_stride + column, x * factor, y * factor);
            });
            return;
        }
        Family::for_each_pair(c, [&](int row, int column, float x, float y) {
            row += first_row, column += first_column;
            store_shared1(shared + swizzled<OtherTermRows::kChunks>(row, column / kChunk) + column % kChunk * 2,
                          to_half2(x * factor, y * factor));
        });
        __syncthreads();
        staged_to_output(first, out.row_stride, shared, rows, columns);
    }

    // Copies the block's staged rows and columns to the output: those that exist.
    static __device__ __forceinline__ void staged_to_output(unsigned short* first, long long row_stride, unsigned shared, int rows,
                                                            int columns) {
        constexpr int kChunks = OtherTermRows::kChunks;
        const int chunk = threadIdx.x % kChunks;
        if (chunk * kChunk >= columns) return;
        for (int row = threadIdx.x / kChunks; row < min(rows, kStagedRows); row += kStagedThreads / kChunks)
            *reinterpret_cast<uint4*>(first + row * row_stride + chunk * kChunk) =
                load_shared(shared + swizzled<kChunks>(row, chunk));
    }

    // Computes dK or dV of 128 keys, over the queries of all heads of the KV head's group. `key_tile`: counted from the launch's
    // first. `column`: the block's first column of the gradient.
    static __device__ __forceinline__ void key_gradients(const BwdParams& p, const StoredScores& stored, int key_head, int key_tile,
                                                         int column, bool is_dv) {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const unsigned shared = shared_address(shared_memory);
        const Lane lane(threadIdx.x % 32);
        const int batch = blockIdx.z, group = p.problem.nheads / p.problem.nheads_k;
        const int first_key = (stored.first_key_tile + key_tile) * kStoredRows;
        const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
        if (first_key >= sequence.seqlen_k_allocated()) return;  // the rows of dK and dV; those from seqlen_k() on become 0
        const Mask mask = mask_of(p.problem, sequence);
        // queries [first, end) of a head that see any of the keys, from a whole step on
        const int first = mask.row_first(first_key) / kStagedTerms * kStagedTerms;
        const int end = first_key >= sequence.seqlen_k() ? 0 : mask.row_end(first_key, kStoredRows);
        const int steps_of_head = max((end - first + kStagedTerms - 1) / kStagedTerms, 0);
        // `head`: of the group. first_stored_tile() counts query heads from the launch's first.
        const auto first_tile_of = [&](int head) {
            return first_stored_tile(p, stored, sequence, batch, (key_head - stored.first_head) * group + head);
        };
        // Split kernels keep the first head's tile: else, short of registers, they would repeat its divisions at each load.
        const long long first_tile = Split ? first_tile_of(0) : 0;
        const auto tile_of = [&](int head, int row) {
            const long long of_head = Split ? first_tile + head * stored.query_tiles : first_tile_of(head);
            return stored_tile<Split>(stored, of_head + row / kStoredRows, key_tile);
        };
        // Half tiles (64 queries) of a head that the mask allows; i below counts those of one head after the other. units[0] and
        // [2] are of the tile's first and last 64 keys.
        const int first_half = first / kHalf, halves = steps_of_head ? (end + kHalf - 1) / kHalf - first_half : 0;
        const auto has_scores = [&](int i) {
            const int half = first_half + i % halves;
            const float* units = units_of(stored, tile_of(i / halves, half * kHalf)) + half % 2;
            return units[0] != kAbsentUnit || units[2] != kAbsentUnit;
        };
        int sparse_steps = 0;
        if constexpr (Sparse) sparse_steps = kHalfSteps * PresentHalves::count(group * halves, has_scores);

        Operand selected;
        if constexpr (Split) selected = choose(is_dv, p.dout, p.q);
        const Operand& operand = Split ? selected : is_dv ? p.dout : p.q;
        const unsigned short* scores = Split ? either(is_dv, stored.p, stored.ds) : is_dv ? stored.p : stored.ds;
        const int columns = (is_dv ? p.problem.headdim_v : p.problem.headdim) - column;
        KeySums c = {};
        if (Sparse ? sparse_steps : steps_of_head) {
            const unsigned a_offset = Family::key_a(lane, warp_row());
            const unsigned b_offset = kStagedTile + Family::key_b(lane, warp_column());
            StagedTile<TermColumns, kParts> a;
            StagedTile<OtherTermRows, kParts> b;
            int head = 0, row = Sparse ? 0 : first;  // of the next load
            Product product;
            Unit unit;
            PresentHalves present;
            const auto load = [&](int, int part) {
                if (Sparse && part == 0 && product.number == 0 && row % kHalf == 0) {
                    const int i = present.take(group * halves, has_scores);
                    head = i / halves, row = (first_half + i % halves) * kHalf;
                }
                const long long tile = tile_of(head, row);
                a.load_part(scores + tile + product.a() + row % kStoredRows, kStoredRows, kStoredRows, kStagedTerms, part);
                b.load_part(rows_of(operand, batch, key_head * group + head, sequence.q_offset() + row) + column +
                                product.b(column + columns),  // the headdim: low parts begin after it
                            operand.row_stride, sequence.seqlen_q() - row, columns, part);
                if (part + 1 < kParts) return;
                if (!is_dv) unit.load(scores + tile, warp_row(), row % kStoredRows);
                if (!product.advance()) return;
                row += kStagedTerms;
                if (!Sparse && row >= end) row = first, head++;
            };
            const auto store = [&](unsigned buffer, int part) {
                a.store_part(buffer, part);
                b.store_part(buffer + kStagedTile, part);
                if (part + 1 == kParts) unit.step();
            };
            const int steps = Sparse ? kProducts * sparse_steps : kProducts * group * steps_of_head;
            staged_steps<kParts>(shared, steps, load, store, [&](unsigned buffer, int part) {
                if constexpr (Split)
                    Family::add_keys(c, buffer + a_offset, buffer + b_offset, unit.value, part);
                else
                    Family::multiply_keys(c, buffer + a_offset, buffer + b_offset);
            });
        }
        float factor = p.signed_scale;  // softmax_scale with its sign
        // P^T is stored times kProbabilityUnit, 2^12
        if (is_dv) factor = (p.score_options.rng_state ? p.score_options.dropout_scale : 1.f) / kProbabilityUnit;
        Output selected_out;
        if constexpr (Split) selected_out = choose(is_dv, p.dv, p.dk);
        const Output& out = Split ? selected_out : is_dv ? p.dv : p.dk;
        to_output(c, p, factor, shared, out, rows_of(out, batch, key_head, sequence.k_offset() + first_key) + column,
                  sequence.seqlen_k_allocated() - first_key, columns);
    }

    // Calls f(x, sum) for each four elements x of the lane's accumulators and their float4 `sum` in memory (one launch leaves them
    // to the next in the lanes' own order).
    template <class F>
    static __device__ __forceinline__ void for_each_sum(QuerySums& c, float* sums, F f) {
        float4* first = reinterpret_cast<float4*>(sums) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < kLaneSums; i += 4) f(&reinterpret_cast<float (&)[kLaneSums]>(c)[i], first[i / 4 * kStagedThreads]);
    }

    // Computes dQ of 128 queries, over the launch's keys. `launch_head`: query head, from the launch's first. `column`: first.
    static __device__ __forceinline__ void query_gradients(const BwdParams& p, const StoredScores& stored, int launch_head,
                                                           int query_tile, int column) {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const unsigned shared = shared_address(shared_memory);
        const Lane lane(threadIdx.x % 32);
        const int batch = blockIdx.z, group = p.problem.nheads / p.problem.nheads_k;
        const int head = stored.first_head * group + launch_head, first_row = query_tile * kStoredRows;
        const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
        if (first_row >= sequence.seqlen_q()) return;
        const KeyRange<kStoredRows, kStagedTerms> range(mask_of(p.problem, sequence), first_row);
        const int launch_key = stored.first_key_tile * kStoredRows;
        const int first = max(range.first, launch_key), end = min(range.end, launch_key + stored.key_tiles * kStoredRows);
        const long long tiles = first_stored_tile(p, stored, sequence, batch, launch_head) + query_tile;
        const int columns = p.problem.headdim - column, column_tiles = column_tiles_of(p.problem.headdim);
        float* sums = stored.dq_sums + (tiles * column_tiles + column / kStagedColumns) * kStoredElements;

        QuerySums c;
        if (stored.is_first) {
            clear_tiles(c);
        } else {
            for_each_sum(c, sums, [](float* x, float4& sum) { x[0] = sum.x, x[1] = sum.y, x[2] = sum.z, x[3] = sum.w; });
        }
        const int first_half = first / kHalf, halves = first < end ? (end + kHalf - 1) / kHalf - first_half : 0;
        const auto has_scores = [&](int i) {
            const int key = (first_half + i) * kHalf;
            const long long tile = stored_tile<Split>(stored, tiles, (key - launch_key) / kStoredRows);
            const float* units = units_of(stored, tile) + key / kHalf % 2 * 2;  // of these keys, for both halves of the queries
            return units[0] != kAbsentUnit || units[1] != kAbsentUnit;
        };
        int sparse_steps = 0;
        if constexpr (Sparse) sparse_steps = kHalfSteps * PresentHalves::count(halves, has_scores);
        if (Sparse ? sparse_steps > 0 : first < end) {
            const unsigned a_offset = Family::query_a(lane, warp_row());
            const unsigned b_offset = kStagedTile + Family::query_b(lane, warp_column());
            StagedTile<TermRows, kParts> a;
            StagedTile<OtherTermRows, kParts> b;
            Product product;
            Unit unit;
            PresentHalves present;
            int half = 0;  // Sparse: that of the last load
            const auto load = [&](int step, int part) {
                const int number = step / kProducts;
                if (Sparse && part == 0 && product.number == 0 && number % kHalfSteps == 0)
                    half = first_half + present.take(halves, has_scores);
                const int key = Sparse ? half * kHalf + number % kHalfSteps * kStagedTerms : first + number * kStagedTerms;
                const long long tile = stored_tile<Split>(stored, tiles, (key - launch_key) / kStoredRows);
                a.load_part(stored.ds + tile + product.a() + key % kStoredRows * kStoredRows, kStoredRows, kStagedTerms,
                            kStoredRows, part);
                b.load_part(rows_of(p.k, batch, head / group, sequence.k_offset() + key) + column + product.b(p.problem.headdim),
                            p.k.row_stride, sequence.seqlen_k() - key, columns, part);
                if (part + 1 < kParts) return;
                unit.load(stored.ds + tile, key % kStoredRows, warp_row());
                product.advance();
            };
            const auto store = [&](unsigned buffer, int part) {
                a.store_part(buffer, part);
                b.store_part(buffer + kStagedTile, part);
                if (part + 1 == kParts) unit.step();
            };
            const int steps = Sparse ? sparse_steps : (end - first + kStagedTerms - 1) / kStagedTerms;
            staged_steps<kParts>(shared, kProducts * steps, load, store, [&](unsigned buffer, int part) {
                if constexpr (Split)
                    Family::add_queries(c, buffer + a_offset, buffer + b_offset, unit.value, part);
                else
                    Family::multiply_queries(c, buffer + a_offset, buffer + b_offset);
            });
        }
        if (!stored.is_last) {
            for_each_sum(c, sums, [](float* x, float4& sum) { sum = make_float4(x[0], x[1], x[2], x[3]); });
            return;
        }
        to_output(c, p, p.signed_scale, shared, p.dq, rows_of(p.dq, batch, head, sequence.q_offset() + first_row) + column,
                  sequence.seqlen_q() - first_row, columns);
    }

    // The grid has KV heads fastest, then tiles: dK and dV of all keys, which take longest, then dQ of the last queries first.
    static __device__ __forceinline__ void run(const BwdParams& p, const StoredScores& stored) {
        const int group = p.problem.nheads / p.problem.nheads_k;
        const int key_head = stored.first_head + blockIdx.x % stored.heads;
        if (key_head >= p.problem.nheads_k) return;
        int tile = blockIdx.x / stored.heads;
        const int columns_k = column_tiles_of(p.problem.headdim), columns_v = column_tiles_of(p.problem.headdim_v);
        const int key_blocks = stored.key_tiles * (columns_k + columns_v);
        if (tile < key_blocks) {
            const int column = tile % (columns_k + columns_v);
            const bool is_dv = column >= columns_k;
            key_gradients(p, stored, key_head, tile / (columns_k + columns_v),
                          (is_dv ? column - columns_k : column) * kStagedColumns, is_dv);
        } else {
            tile = gridDim.x / stored.heads - 1 - tile;
            const int item = tile / columns_k;  // number of (query tile, head of the group), heads fastest
            query_gradients(p, stored, (key_head - stored.first_head) * group + item % group, item / group,
                            tile % columns_k * kStagedColumns);
        }
    }
};
