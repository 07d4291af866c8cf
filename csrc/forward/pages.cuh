// K and V of a KV cache as a forward kernel takes them: step by step along the tokens of a sequence, through its pages.
//
// Steps begin at multiples of 16 tokens, and so do pages: so the 16 tokens from there on have one page, whose number is loaded a
// step before it is needed. The numbers are checked before the first step: has_pages().
#pragma once

#include "seqlen_info.cuh"

// Tokens that have one page.
constexpr int kPageGroup = 16;

// Whether the cache has the pages of all tokens that some row of the sequence sees. (What a window has left behind may be gone.)
// The whole block asks.
__device__ __forceinline__ bool has_pages(const Cache& cache, int batch, const CacheSeqlenInfo& sequence, const Mask& mask) {
    bool has = true;
    const int first = mask.key_first(0), end = sequence.seqlen_k();
    if (cache.block_table && first < end) {
        const int last = (end - 1) / cache.rows;
        for (int i = first / cache.rows + threadIdx.x; i <= last; i += THREADS) has &= has_page(cache, page_of(cache, batch, i));
    }
    return __syncthreads_and(has);
}

// Without a branch, which would part the products of a step.
__device__ __forceinline__ void load_page_if(bool has, int& page, const int* from) {
    asm volatile(
        "{.reg .pred has;\n"
        "setp.ne.s32 has, %2, 0;\n"
        "@has ld.global.nc.s32 %0, [%1];}"
        : "+r"(page)
        : "l"(from), "r"(static_cast<int>(has)));
}

// Where the walk is: at the Groups groups of tokens from the first that a thread takes of a step of Step tokens. InBranch is for
// kernels that have no register left: ptxas then mixes less.
template <int Step, int Groups, bool InBranch = false>
class PageIterator {
    static_assert(Step % kPageGroup == 0 && Groups * kPageGroup <= Step, "see above");
    int index_;  // of the first group's page in the sequence's row of the block table
    int row_;    // of the first group in that page
    int page_[Groups];

    __device__ __forceinline__ static void wrap_row(const Cache& cache, int& row, int& index) {
        if (row >= cache.rows) row -= cache.rows, index++;
    }
    // Where group g is.
    __device__ __forceinline__ int row_of(const Cache& cache, int g, int& index) const {
        int row = row_;
        index = index_;
#pragma unroll
        for (int i = 0; i < g; i++) {
            row += kPageGroup;
            wrap_row(cache, row, index);
        }
        return row;
    }

public:
    // `token`, a multiple of 16, is the first group's first.
    __device__ __forceinline__ PageIterator(const Cache& cache, int batch, int k_offset, int token, int end) {
        index_ = (k_offset + token) / cache.rows;
        row_ = k_offset + token - index_ * cache.rows;
#pragma unroll
        for (int g = 0; g < Groups; g++) page_[g] = cache.block_table ? 0 : CacheSeqlenInfo::entry(cache, batch);
        look_up(cache, token, end);
    }
    // The pages of the groups, of which the first begins with `token`. Tokens from `end` on have none.
    __device__ __forceinline__ void look_up(const Cache& cache, int token, int end) {
#pragma unroll
        for (int g = 0; g < Groups; g++) {
            int index;
            row_of(cache, g, index);
            const int* sequence = cache.block_table + remat_block_batch() * cache.block_table_stride;
            const bool has = cache.block_table && token + g * kPageGroup < end;
            if (!InBranch)
                load_page_if(has, page_[g], sequence + index);
            else if (has)
                page_[g] = __ldg(sequence + index);
        }
    }
    // To the next step, in which the first group begins with `token`.
    __device__ __forceinline__ void advance(const Cache& cache, int token, int end) {
        row_ += Step;
#pragma unroll
        for (int i = 0; i < Step; i += kPageGroup) wrap_row(cache, row_, index_);
        look_up(cache, token, end);
    }
    // The element that is `rows` rows behind that of group g which lies at `column` in row 0 of page 0.
    __device__ __forceinline__ const unsigned short* address(const Cache& cache, const Operand& x, const unsigned short* column,
                                                             int g, int rows) const {
        int index;
        const unsigned short* row = rows_after(column, row_of(cache, g, index) + rows, x.row_stride);
        // of a number of 32 bits and one of 64: two multiply-adds
        const unsigned long long bytes = static_cast<unsigned>(2 * page_[g]) * static_cast<unsigned long long>(x.batch_stride);
        return reinterpret_cast<const unsigned short*>(reinterpret_cast<unsigned long long>(row) + bytes);
    }
};

// What kernels without pages have instead, and never ask.
struct NoPages {
    __device__ __forceinline__ NoPages(const Cache&, int, int, int, int) {}
    __device__ __forceinline__ void advance(const Cache&, int, int) {}
    __device__ __forceinline__ const unsigned short* address(const Cache&, const Operand&, const unsigned short* column, int,
                                                             int) const {
        return column;
    }
};
template <bool Paged, int Step, int Groups, bool InBranch>
struct PageIteratorIf {
    using Type = NoPages;
};
template <int Step, int Groups, bool InBranch>
struct PageIteratorIf<true, Step, Groups, InBranch> {
    using Type = PageIterator<Step, Groups, InBranch>;
};

// TileStream (tile.cuh) through pages.
template <int Chunks, int Rows, int Threads>
struct PagedTileStream : TileStream<Chunks, Rows, Threads> {
    using Stream = TileStream<Chunks, Rows, Threads>;
    using Stream::has_chunk, Stream::has_row, Stream::next, Stream::row_of;
    using Stream::kChunksPerRow, Stream::kPasses, Stream::kRowsPerPass, Stream::kThreadsPerRow;
    using Pages = PageIterator<Rows, (kPasses - 1) * kRowsPerPass / kPageGroup + 1>;

    // Rows of a tile before the group of the thread's first.
    __device__ __forceinline__ static int first_group(int thread) { return row_of(thread) / kPageGroup * kPageGroup; }

    // The tokens before `last`. (`next` stays in row 0 of page 0.)
    __device__ __forceinline__ PagedTileStream(int thread, const Operand& x, int head, int columns, int last)
        : Stream(thread, x.ptr + head * x.head_stride, x.row_stride, columns, -first_group(thread), last) {}

    // Loads the tile at which the walk is, whose first row is number `row`.
    template <int Passes, int ChunksPerRow>
    __device__ __forceinline__ void load(uint4 (&data)[Passes][ChunksPerRow], const Cache& cache, const Operand& x,
                                         const Pages& pages, int row) const {
#pragma unroll
        for (int i = 0; i < kPasses; i++) {
            const int rows = i * kRowsPerPass;
            const unsigned short* from = pages.address(cache, x, next, rows / kPageGroup, rows % kPageGroup);
#pragma unroll
            for (int c = 0; c < kChunksPerRow; c++)
                load_global_if(has_row(row, i) && has_chunk(c), data[i][c], from + c * kThreadsPerRow * kChunk);
        }
    }
};

// The tiles of K and of V of a block, which take turns: each of K before that of V.
template <bool Paged, int Chunks, int ChunksV, int Rows, int Threads>
struct KvTiles {
    TileStream<Chunks, Rows, Threads> k;
    TileStream<ChunksV, Rows, Threads> v;
    unsigned k_stride, v_stride;

    // The keys `first` to `last` - 1 of a sequence whose key 0 is row k_offset of its entry.
    template <class Block>
    __device__ __forceinline__ KvTiles(int thread, const FwdParams& p, const Block& block, int k_offset, int first, int last)
        : k(thread, rows_of(p.k, block.batch, block.head_k, k_offset), p.k.row_stride, p.problem.headdim, first, last),
          v(thread, rows_of(p.v, block.batch, block.head_k, k_offset), p.v.row_stride, p.problem.headdim_v, first, last),
          k_stride(p.k.row_stride), v_stride(p.v.row_stride) {}

    // Loads the next tile, whose first key is number `key`.
    template <class Data>
    __device__ __forceinline__ void load_k(Data& data, const FwdParams&, int key) {
        k.load(data, k_stride, key);
    }
    template <class Data>
    __device__ __forceinline__ void load_v(Data& data, const FwdParams&, int key) {
        v.load(data, v_stride, key);
    }
};

template <int Chunks, int Rows, int Threads>
struct KvTiles<true, Chunks, Chunks, Rows, Threads> {
    using Stream = PagedTileStream<Chunks, Rows, Threads>;
    Stream k, v;
    typename Stream::Pages pages;
    int group, last;

    template <class Block>
    __device__ __forceinline__ KvTiles(int thread, const FwdParams& p, const Block& block, int k_offset, int first, int last_)
        : k(thread, p.cache.k, block.head_k, p.problem.headdim, last_),
          v(thread, p.cache.v, block.head_k, p.problem.headdim_v, last_),
          pages(p.cache, block.batch, k_offset, first + Stream::first_group(thread), last_), group(Stream::first_group(thread)),
          last(last_) {}

    template <class Data>
    __device__ __forceinline__ void load_k(Data& data, const FwdParams& p, int key) {
        k.load(data, p.cache, p.cache.k, pages, key);
    }
    template <class Data>
    __device__ __forceinline__ void load_v(Data& data, const FwdParams& p, int key) {
        v.load(data, p.cache, p.cache.v, pages, key);
        pages.advance(p.cache, key + Rows + group, last);
    }
};
