// Loads keys for the kernel of indexer.cuh, DeepSeek V3.2's lightning indexer: it scores each key for a query (logits), from which
// the caller chooses the tokens that sparse attention visits. Keys are rows of 128 e4m3 codes with an fp32 scale, in pages of a
// cache (2^p.page_shift keys each). A block's threads load a step (Step keys) into registers, and store it to shared memory one
// step later: codes as fp16 that are KeyCodes::kScale (144) times the numbers, in rows of kPitch bytes, scales to an array of their
// own. THREADS, of a block, is from the kernel's row in src/kernels.
#pragma once

#include "indexer/queries.cuh"  // KeyCodes, kPitch; kColumns is 128, kChunkBytes 16; IndexerParams (src/params)

namespace indexer {

// A thread's part of a step: pieces of eight codes, two of each of its keys, and in the thread with piece 0 the keys' scales (in
// others -inf).
template <int Pieces>
struct KeyPieces {
    uint2 codes[Pieces];
    float scale[Pieces / 2];
};

// Loads a thread's part of each step. For each step the caller calls find_pages(), one step later load(), and one step later
// store() and store_scales(): codes are in flight for a step, page numbers for one more. As `page` has one step's, load() of a step
// comes before find_pages() of the next.
template <int Step>
struct KeyLoader {
    // Eight threads have a key, each two pieces: columns 8 * piece to 8 * piece + 7, and those 64 further. So eight neighboring
    // threads store 128 consecutive bytes of fp16.
    static constexpr int kThreadsPerKey = 8, kKeysAtOnce = THREADS / kThreadsPerKey, kPasses = Step / kKeysAtOnce, kNoPage = -1;
    using Pieces = KeyPieces<2 * kPasses>;

    const IndexerParams& p;
    const int* table;  // the batch entry's row of the block table; null: dense keys, one page of 2^31 (page_shift 31)
    int end;  // keys from here on are not loaded
    int row, piece;  // the thread's first key of a step, and its number among that key's threads
    int page[kPasses];  // of each of its keys
    Pieces arriving;  // what load() loaded last

    __device__ __forceinline__ KeyLoader(const IndexerParams& p_, int batch, int end_)
        : p(p_), table(p_.block_table ? p_.block_table + batch * p_.block_table_stride : nullptr), end(end_),
          row(threadIdx.x / kThreadsPerKey), piece(threadIdx.x % kThreadsPerKey) {}

    // Loads the page numbers of the step that begins with `key`, unvalidated (load() compares them with p.pages); kNoPage from key
    // `end` on.
    __device__ __forceinline__ void find_pages(int key) {
#pragma unroll
        for (int i = 0; i < kPasses; i++) {
            const int own_key = key + row + i * kKeysAtOnce;
            page[i] = own_key < end ? 0 : kNoPage;
            if (table && own_key < end) page[i] = __ldg(table + (own_key >> p.page_shift));
        }
    }
    // Loads the codes and scales of that step, 8 codes at a time. A key without a page keeps old codes, which have no effect: its
    // scale is -inf (0xff800000), for which indexer.cuh compares, and writes -inf as its logit.
    __device__ __forceinline__ void load(int key) {
#pragma unroll
        for (int i = 0; i < kPasses; i++) {
            const int in_page = (key + row + i * kKeysAtOnce) & ((1u << p.page_shift) - 1);
            arriving.scale[i] = __int_as_float(0xff800000);
            if (static_cast<unsigned>(page[i]) >= static_cast<unsigned>(p.pages)) continue;
            const unsigned char* base =
                reinterpret_cast<const unsigned char*>(p.k) + page[i] * p.page_stride + static_cast<long long>(in_page) * kColumns;
            arriving.codes[2 * i] = __ldg(reinterpret_cast<const uint2*>(base) + piece);
            arriving.codes[2 * i + 1] = __ldg(reinterpret_cast<const uint2*>(base) + piece + kThreadsPerKey);
            if (piece == 0) arriving.scale[i] = __ldg(p.k_scales + page[i] * p.scales_page_stride + in_page);
        }
    }
    // Stores `codes`, a loaded piece, as fp16 to the step's rows at shared address `keys`. Its number is 2 * i for the first piece
    // of the thread's key of pass i, 2 * i + 1 for the second.
    __device__ __forceinline__ void store(unsigned keys, const uint2& codes, int number) const {
        const unsigned words[2] = {codes.x, codes.y};
        const unsigned to = keys + row * kPitch + piece * kChunkBytes;
        store_shared(to + number / 2 * (kKeysAtOnce * kPitch) + number % 2 * (kThreadsPerKey * kChunkBytes),
                     KeyCodes::unpack8(words));
    }
    // Stores the scales of x, `arriving` or a copy made before the next load(), as fp32 in the order of keys.
    __device__ __forceinline__ void store_scales(unsigned scales, const Pieces& x) const {
#pragma unroll
        for (int i = 0; i < kPasses; i++)
            if (piece == 0) store_shared1(scales + (row + i * kKeysAtOnce) * 4, __float_as_uint(x.scale[i]));
    }
};

}  // namespace indexer
