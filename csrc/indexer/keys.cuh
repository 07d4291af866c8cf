// Loads the keys of the lightning indexer (indexer.cuh). Their e4m3 codes become fp16 in shared memory, KeyCodes::kScale times what
// they stand for; the keys' scales lie beside.
//
// The kernel's row in src/kernels gives THREADS, of a block.
#pragma once

#include "indexer/queries.cuh"

namespace indexer {

// A thread's part of a step that has arrived: pieces of eight codes, and scales.
template <int Pieces>
struct KeyPieces {
    uint2 codes[Pieces];
    float scale[Pieces / 2];
};

// A thread's part of steps of Step keys. Codes are in flight for a step, page numbers for one more.
template <int Step>
struct KeyLoader {
    // Eight threads have a key, each two pieces of 8 columns: so eight neighbors store 128 consecutive bytes.
    static constexpr int kThreadsPerKey = 8;
    static constexpr int kKeysAtOnce = THREADS / kThreadsPerKey;
    static constexpr int kPasses = Step / kKeysAtOnce;
    static constexpr int kNoPage = -1;
    using Pieces = KeyPieces<2 * kPasses>;

    const IndexerParams& p;
    const int* table;  // of the sequence; null: all keys are in one page
    int end;  // keys from here on are not loaded
    int row, piece;
    int page[kPasses];
    Pieces arriving;

    __device__ __forceinline__ KeyLoader(const IndexerParams& p_, int batch, int end_)
        : p(p_), table(p_.block_table ? p_.block_table + batch * p_.block_table_stride : nullptr), end(end_),
          row(threadIdx.x / kThreadsPerKey), piece(threadIdx.x % kThreadsPerKey) {}

    // Loads the page numbers of the step that begins with `key`.
    __device__ __forceinline__ void find_pages(int key) {
#pragma unroll
        for (int i = 0; i < kPasses; i++) {
            const int own = key + row + i * kKeysAtOnce;
            page[i] = own < end ? 0 : kNoPage;
            if (table && own < end) page[i] = __ldg(table + (own >> p.page_shift));
        }
    }
    // Loads the codes of that step. Keys of pages that do not exist keep old codes, and get the scale -inf, which becomes their
    // logit (indexer.cuh).
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
    // Stores eight codes, those of piece `number`, to `keys`: rows of kPitch bytes.
    __device__ __forceinline__ void store(unsigned keys, const uint2& codes, int number) const {
        const unsigned words[2] = {codes.x, codes.y};
        const unsigned own = keys + row * kPitch + piece * kChunkBytes;
        store_shared(own + number / 2 * (kKeysAtOnce * kPitch) + number % 2 * (kThreadsPerKey * kChunkBytes),
                     KeyCodes::unpack8(words));
    }
    // Stores scales to `scales`.
    __device__ __forceinline__ void store_scales(unsigned scales, const Pieces& x) const {
#pragma unroll
        for (int i = 0; i < kPasses; i++)
            if (piece == 0) store_shared1(scales + (row + i * kKeysAtOnce) * 4, __float_as_uint(x.scale[i]));
    }
};

}  // namespace indexer
