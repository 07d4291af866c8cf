// C = A B^T for Turing, all row-major halves, accumulated in halves (HMMA.1688.F16) as in Yan, Wang and Chu's HGEMM: tiles of 256x256
// in steps of 32, 8 warps of 128x64. Sizes are multiples of a tile's. Two stages of shared memory; ours, not theirs.
using u32 = unsigned;

constexpr int kTile = 256, kStep = 32, kThreads = 256;
constexpr int kStage = 2 * kTile * kStep * 2;  // bytes, A then B

__device__ __forceinline__ u32 at(int row, int chunk) {
    // rows of 64 bytes: chunks of 16 change places so that 8 rows of a column of chunks lie in different banks
    return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) gemm(const uint4* a, const uint4* b, u32* c, int n, int k) {
    extern __shared__ __align__(16) unsigned char shared[];
    const u32 base = static_cast<u32>(__cvta_generic_to_shared(shared));
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int row_of_warp = (warp & 1) * 128, column_of_warp = (warp >> 1) * 64;
    // a thread moves chunk thread % 4 of rows thread / 4 + 64 i
    const uint4* from_a = a + ((blockIdx.y * kTile + thread / 4) * (long long)k) / 8 + thread % 4;
    const uint4* from_b = b + ((blockIdx.x * kTile + thread / 4) * (long long)k) / 8 + thread % 4;
    const u32 to = at(thread / 4, thread % 4);
    uint4 staged[8];
    u32 sums[8][8][2] = {};

    auto fetch = [&](int step) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            staged[i] = from_a[step * (kStep / 8) + i * 64ll * k / 8];
            staged[4 + i] = from_b[step * (kStep / 8) + i * 64ll * k / 8];
        }
    };
    auto store = [&](int stage) {
#pragma unroll
        for (int i = 0; i < 8; i++) *reinterpret_cast<uint4*>(shared + stage * kStage + to + i * 64 * 64) = staged[i];
    };
    // lane l of a load of four 8x8 matrices gives row l % 16 of chunk l / 16 (A), or row l % 8 + l / 16 * 8 of chunk l / 8 % 2 (B)
    const int row_a = row_of_warp + (lane & 15), chunk_a = lane >> 4;
    const int row_b = column_of_warp + (lane & 7) + (lane >> 4) * 8, chunk_b = lane >> 3 & 1;
    auto multiply = [&](int stage) {
        const u32 tile_a = base + stage * kStage, tile_b = tile_a + kTile * kStep * 2;
#pragma unroll
        for (int pair = 0; pair < kStep / 16; pair++) {
            u32 left[8][4], right[4][4];
#pragma unroll
            for (int i = 0; i < 8; i++) load_matrices(left[i], tile_a + at(row_a + 16 * i, 2 * pair + chunk_a));
#pragma unroll
            for (int j = 0; j < 4; j++) load_matrices(right[j], tile_b + at(row_b + 16 * j, 2 * pair + chunk_b));
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3}, {%4}, {%0,%1};"
                                     : "+r"(sums[i][j][0]), "+r"(sums[i][j][1])
                                     : "r"(left[i][2 * half]), "r"(left[i][2 * half + 1]), "r"(right[j / 2][2 * (j & 1) + half]));
        }
    };

    const int steps = k / kStep;
    fetch(0);
    store(0);
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        if (step + 1 < steps) fetch(step + 1);
        multiply(step & 1);
        if (step + 1 < steps) store(~step & 1);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = blockIdx.y * kTile + row_of_warp + 16 * i + 8 * h + lane / 4;
                const int column = blockIdx.x * kTile + column_of_warp + 8 * j + 2 * (lane & 3);
                c[(row * (long long)n + column) / 2] = sums[i][j][h];
            }
}
