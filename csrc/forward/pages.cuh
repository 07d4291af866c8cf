// K and V of the paged forward (prefill) kernels: tiles of a KV cache along a sequence's tokens. The block table names the page of
// each cache.rows tokens. volta's forward kernels load by KvTiles, which has one interface with and without pages, or by
// PagedTileStream, turing's by PageIterator.
//
// Steps begin at multiples of 16 tokens, and so do pages (leftpad_k excludes a block table). So each group of 16 tokens lies in
// one page. The page number is loaded one step before it is needed. has_pages() checks all page numbers before the first step.
// A contiguous cache goes through the same code: a sequence's entry is its page.
#pragma once

#include "conditional.cuh"
#include "seqlen_info.cuh"  // CacheSeqlenInfo: lengths of a sequence; entry(): its cache entry; Cache, Operand (src/params)

constexpr int kPageGroup = 16;  // tokens of a group

// Returns whether the cache has all pages that the sequence reads; those before a window may be missing. Contains a barrier: all
// threads of the block call it together. THREADS: of the block, from the kernel's row in src/kernels. page_of() reads the block
// table, has_page() tells whether the cache has that page (cache.cuh).
__device__ __forceinline__ bool has_pages(const Cache& cache, int batch, const CacheSeqlenInfo& sequence, const Mask& mask) {
    bool has = true;
    const int first = mask.key_first(0), end = sequence.seqlen_k();
    if (cache.block_table && first < end) {
        const int last = (end - 1) / cache.rows;
        for (int i = first / cache.rows + threadIdx.x; i <= last; i += THREADS) has &= has_page(cache, page_of(cache, batch, i));
    }
    return __syncthreads_and(has);
}

// Iterates over the pages of the Groups groups of 16 tokens that a thread loads in each step of Step tokens. InBranch: loads page
// numbers in a branch instead of by predicated loads. ptxas then interleaves less, which kernels without a free register need.
template <int Step, int Groups, bool InBranch = false>
class PageIterator {
    static_assert(Step % kPageGroup == 0 && Groups * kPageGroup <= Step, "a step is whole groups of one page");
    int index_;  // block-table column of the first group's page
    int row_;  // row of the first group in that page
    int page_[Groups];  // page number of each group, in the cache

    // Moves a row past the end of a page to the next page (pages have at least 16 rows, and a group moves by 16).
    __device__ __forceinline__ static void wrap_row(const Cache& cache, int& row, int& index) {
        if (row >= cache.rows) row -= cache.rows, index++;
    }
    // Returns the row of group g in its page, and sets `index`, the page's block-table column.
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
    // `k_offset`: cache row of token 0. `token`: first token of the first group, a multiple of 16. `end`: tokens of the sequence.
    __device__ __forceinline__ PageIterator(const Cache& cache, int batch, int k_offset, int token, int end) {
        index_ = (k_offset + token) / cache.rows;
        row_ = k_offset + token - index_ * cache.rows;
#pragma unroll
        for (int g = 0; g < Groups; g++) page_[g] = cache.block_table ? 0 : CacheSeqlenInfo::entry(cache, batch);
        look_up(cache, token, end);
    }
    // Loads the groups' page numbers, where the first group begins with `token`. Tokens from `end` on have no page.
    __device__ __forceinline__ void look_up(const Cache& cache, int token, int end) {
#pragma unroll
        for (int g = 0; g < Groups; g++) {
            int index;
            row_of(cache, g, index);
            // the batch entry is read again (ptx.cuh), so that the row of the table holds no register
            const int* sequence = cache.block_table + remat_block_batch() * cache.block_table_stride;
            const bool has = cache.block_table && token + g * kPageGroup < end;
            if (!InBranch)
                load_int_if(has, page_[g], sequence + index);
            else if (has)
                page_[g] = __ldg(sequence + index);
        }
    }
    // Advances to the next step, where the first group begins with `token`.
    __device__ __forceinline__ void advance(const Cache& cache, int token, int end) {
        row_ += Step;
#pragma unroll
        for (int i = 0; i < Step; i += kPageGroup) wrap_row(cache, row_, index_);
        look_up(cache, token, end);
    }
    // Returns the address `rows` rows after `column`, an address that counts as if group g began at row 0 of page 0. Strides are in
    // elements: row_stride from a row to the next, batch_stride from a page of the cache to the next.
    __device__ __forceinline__ const unsigned short* address(const Cache& cache, const Operand& x, const unsigned short* column,
                                                             int g, int rows) const {
        int index;
        const unsigned short* row = rows_after(column, row_of(cache, g, index) + rows, x.row_stride);
        // 2 bytes an fp16 element. 32-bit by 64-bit product: two multiply-adds.
        const unsigned long long bytes = static_cast<unsigned>(2 * page_[g]) * static_cast<unsigned long long>(x.batch_stride);
        return reinterpret_cast<const unsigned short*>(reinterpret_cast<unsigned long long>(row) + bytes);
    }
};

// Stands in for PageIterator in kernels without pages: calls compile to nothing.
struct NoPages {
    __device__ __forceinline__ NoPages(const Cache&, int, int, int, int) {}
    __device__ __forceinline__ void advance(const Cache&, int, int) {}
    __device__ __forceinline__ const unsigned short* address(const Cache&, const Operand&, const unsigned short* column, int,
                                                             int) const {
        return column;
    }
};
template <int Step, int Groups, bool InBranch>
using PageIteratorIfPaged = typename Conditional<kPaged, PageIterator<Step, Groups, InBranch>, NoPages>::Type;

// Loads tiles of K or of V through pages, one after the other. As in TileStream (tile.cuh), registers of chunks that do not exist
// keep their contents, and `next` is the thread's first chunk (8 columns) of a tile. A thread loads chunks of one row in each of
// kPasses passes, kRowsPerPass rows apart; these rows lie in the groups that its Pages iterate over.
template <int Chunks, int Rows, int Threads>
struct PagedTileStream : TileStream<Chunks, Rows, Threads> {
    using Stream = TileStream<Chunks, Rows, Threads>;
    using Stream::has_chunk, Stream::has_row, Stream::next, Stream::row_of;
    using Stream::kChunksPerRow, Stream::kPasses, Stream::kRowsPerPass, Stream::kThreadsPerRow;
    using Pages = PageIterator<Rows, (kPasses - 1) * kRowsPerPass / kPageGroup + 1>;

    // Row of the tile at which the group of the thread's first row begins.
    __device__ __forceinline__ static int first_group(int thread) { return row_of(thread) / kPageGroup * kPageGroup; }

    // Streams the tokens before `last`. Unlike TileStream's, `next` does not move: address() adds the group's row and its page. So
    // it stays in page 0 at the thread's row in its group, row_of() - first_group(), and TileStream's first row is -first_group().
    __device__ __forceinline__ PagedTileStream(int thread, const Operand& x, int head, int columns, int last)
        : Stream(thread, x.ptr + head * x.head_stride, x.row_stride, columns, -first_group(thread), last) {}

    // Loads the tile at the iterator's position, whose first row is number `row`.
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

// Tiles of K and V of a block, in turn: each tile of K before that of V. load_k() and load_v() load into the caller's registers.
// The specialization below goes through pages. Chunks, ChunksV: 16-byte chunks of a row of K and of V. Rows: keys of a tile.
// Stream: TileStream, or ListedTileStream under a block-sparse mask.
template <bool Paged, int Chunks, int ChunksV, int Rows, int Threads, template <int, int, int> class Stream = TileStream>
struct KvTiles {
    static_assert(!Paged, "paged kernels have ChunksV == Chunks");
    Stream<Chunks, Rows, Threads> k;
    Stream<ChunksV, Rows, Threads> v;
    unsigned k_stride, v_stride;

    // Streams keys `first` to last - 1 of a sequence whose key 0 is row k_offset of its batch entry.
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

template <int Chunks, int Rows, int Threads, template <int, int, int> class Unused>
struct KvTiles<true, Chunks, Chunks, Rows, Threads, Unused> {
    using Stream = PagedTileStream<Chunks, Rows, Threads>;
    Stream k, v;
    typename Stream::Pages pages;
    int first_group, last;  // row of the thread's first group in a tile; one past the last key

    template <class Block>
    __device__ __forceinline__ KvTiles(int thread, const FwdParams& p, const Block& block, int k_offset, int first, int last_)
        : k(thread, p.cache.k, block.head_k, p.problem.headdim, last_),
          v(thread, p.cache.v, block.head_k, p.problem.headdim_v, last_),
          pages(p.cache, block.batch, k_offset, first + Stream::first_group(thread), last_),
          first_group(Stream::first_group(thread)), last(last_) {}

    template <class Data>
    __device__ __forceinline__ void load_k(Data& data, const FwdParams& p, int key) {
        k.load(data, p.cache, p.cache.k, pages, key);
    }
    template <class Data>
    __device__ __forceinline__ void load_v(Data& data, const FwdParams& p, int key) {
        v.load(data, p.cache, p.cache.v, pages, key);
        pages.advance(p.cache, key + Rows + first_group, last);
    }
};
