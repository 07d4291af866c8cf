// Inline PTX that kernels share: values to keep in registers, special registers to read again (remat_*: rematerialization, as in
// CUTLASS), loads and stores in program order, barriers, and the maximum over a warp. Included by most kernels, usually through
// tile.cuh. They need it because registers limit them, and because the compiler keeps volatile PTX in program order. Files with one
// use for an instruction have it themselves, most of them arithmetic (half.cuh, softmax.cuh, {volta,turing}/mma.cuh).
#pragma once

// ---- registers ------------------------------------------------------------------------------------

// Hides from the compiler how x is computed, so that it keeps x in a register instead of computing it again in each iteration.
__device__ __forceinline__ int keep_in_register(int x) {
    asm volatile("mov.b32 %0, %0;" : "+r"(x));
    return x;
}
__device__ __forceinline__ float* keep_in_register(float* x) {
    asm volatile("mov.b64 %0, %0;" : "+l"(x));
    return x;
}

// Hides x's computation as keep_in_register() does, but without an instruction: for the compiler x changes here.
__device__ __forceinline__ void make_opaque(int& x) { asm volatile("" : "+r"(x)); }

// Two shared addresses in one register. The volatile PTX hides their computation: otherwise the compiler would recompute each from
// threadIdx under register pressure. Addresses are even and below 2^17, so that half of each fits 16 bits.
class AddressPair {
    unsigned packed_;

public:
    __device__ __forceinline__ AddressPair(unsigned first, unsigned second) : packed_(first / 2 | second / 2 << 16) {
        asm volatile("mov.b32 %0, %0;" : "+r"(packed_));
    }
    __device__ __forceinline__ unsigned first() const { return (packed_ & 0xffff) * 2; }
    __device__ __forceinline__ unsigned second() const { return (packed_ >> 16) * 2; }
};

// Functions that read a special register again, for code that runs rarely: what is derived from it is computed there, and holds no
// register elsewhere. remat_thread_index() is threadIdx.x, the others are blockIdx.x, y and z. Most grids have a batch entry on the
// z axis, and row blocks and heads on x and y in either order.
#define VOLTA_FA_REMAT(NAME, SPECIAL_REGISTER)                         \
    __device__ __forceinline__ int NAME() {                            \
        int x;                                                         \
        asm volatile("mov.u32 %0, %%" SPECIAL_REGISTER ";" : "=r"(x)); \
        return x;                                                      \
    }
VOLTA_FA_REMAT(remat_thread_index, "tid.x")
VOLTA_FA_REMAT(remat_block_x, "ctaid.x")
VOLTA_FA_REMAT(remat_block_y, "ctaid.y")
VOLTA_FA_REMAT(remat_block_batch, "ctaid.z")
#undef VOLTA_FA_REMAT

// Copies a kernel's parameter from constant memory again, so that it holds no register between uses.
__device__ __forceinline__ float remat_parameter(float x) {
    float y;
    asm volatile("mov.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- shared memory --------------------------------------------------------------------------------

// 32-bit address in shared memory, for inline PTX.
__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Loads and stores of 16 bytes, a chunk, in shared memory. Volatile, so that they stay in program order. No memory clobber: the
// compiler may move C++ accesses past them, so a barrier has to separate both kinds where they meet.
__device__ __forceinline__ uint4 load_shared(unsigned address) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address));
    return r;
}
__device__ __forceinline__ void store_shared(unsigned address, const uint4& r) {
    asm volatile("st.shared.v4.u32 [%4], {%0, %1, %2, %3};" ::"r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w), "r"(address));
}
// The same for 8 bytes.
__device__ __forceinline__ uint2 load_shared2(unsigned address) {
    uint2 r;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address));
    return r;
}
__device__ __forceinline__ void store_shared2(unsigned address, unsigned x, unsigned y) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y));
}
// The same for 4 bytes.
__device__ __forceinline__ unsigned load_shared1(unsigned address) {
    unsigned r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address));
    return r;
}
__device__ __forceinline__ void store_shared1(unsigned address, unsigned x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x));
}
// Stores 8 bytes if `exists`, without a branch.
__device__ __forceinline__ void store_shared2_if(bool exists, unsigned address, unsigned x, unsigned y) {
    asm volatile(
        "{.reg .pred exists;\n"
        "setp.ne.s32 exists, %3, 0;\n"
        "@exists st.shared.v2.u32 [%0], {%1, %2};}" ::"r"(address),
        "r"(x), "r"(y), "r"(static_cast<int>(exists)));
}

// ---- global memory --------------------------------------------------------------------------------

// Loads the chunk at p into r if `inside`. r is read and written: ptxas keeps a predicated load's registers live before it.
__device__ __forceinline__ void load_global_if(bool inside, uint4& r, const unsigned short* p) {
    asm volatile(
        "{.reg .pred inside;\n"
        "setp.ne.s32 inside, %5, 0;\n"
        "@inside ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
        : "l"(p), "r"(static_cast<int>(inside)));
}
// As load_global_if, but not by the read-only path: ptxas moves loads of that path past barriers, next to where they are used.
__device__ __forceinline__ void load_before_barrier_if(bool inside, uint4& r, const unsigned short* p) {
    asm volatile(
        "{.reg .pred inside;\n"
        "setp.ne.s32 inside, %5, 0;\n"
        "@inside ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
        : "l"(p), "r"(static_cast<int>(inside)));
}
// Loads *from if `inside`; x keeps its value otherwise. Predicated, because a branch would stop ptxas from interleaving.
__device__ __forceinline__ void load_int_if(bool inside, int& x, const int* from) {
    asm volatile(
        "{.reg .pred inside;\n"
        "setp.ne.s32 inside, %2, 0;\n"
        "@inside ld.global.nc.s32 %0, [%1];}"
        : "+r"(x)
        : "l"(from), "r"(static_cast<int>(inside)));
}
// Returns *from if it `exists`, else 0.
__device__ __forceinline__ float load_float_or_0(bool exists, const float* from) {
    float x;
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; mov.f32 %0, 0f00000000; @p ld.global.nc.f32 %0, [%1];}"
                 : "=&f"(x)
                 : "l"(from), "r"(static_cast<int>(exists)));
    return x;
}
// Loads Words (1, 2 or 4) 32-bit words from `from` into x if `columns` > Column; else x keeps its values. Column is a template
// parameter, so that the comparison has an immediate operand.
template <int Column, int Words>
__device__ __forceinline__ void load_columns(int columns, unsigned* x, const void* from) {
    static_assert(Words == 1 || Words == 2 || Words == 4, "words of a load");
    if constexpr (Words == 4)
        asm volatile("{.reg .pred p; setp.gt.s32 p, %5, %6; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];}"
                     : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])
                     : "l"(from), "r"(columns), "n"(Column));
    else if constexpr (Words == 2)
        asm volatile("{.reg .pred p; setp.gt.s32 p, %3, %4; @p ld.global.nc.v2.u32 {%0, %1}, [%2];}"
                     : "+r"(x[0]), "+r"(x[1])
                     : "l"(from), "r"(columns), "n"(Column));
    else
        asm volatile("{.reg .pred p; setp.gt.s32 p, %2, %3; @p ld.global.nc.u32 %0, [%1];}"
                     : "+r"(x[0])
                     : "l"(from), "r"(columns), "n"(Column));
}
// Prefetches the 32 bytes at `sector` into L2 if they exist.
__device__ __forceinline__ void prefetch_l2_if(bool exists, const void* sector) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %1, 0; @p prefetch.global.L2 [%0];}" ::"l"(sector), "r"(static_cast<int>(exists)));
}

// Volatile loads of small values: code loads one again at each use, instead of holding a register. Numbers in names count 4-byte
// words. load_float_constant() and load_global2_constant() take the read-only path (.nc): ptxas moves these past barriers, next to
// where they are used.
#define VOLTA_FA_LOAD(NAME, TYPE, POINTER, CONSTRAINT, INSTRUCTION)                   \
    __device__ __forceinline__ TYPE NAME(POINTER p) {                                 \
        TYPE x;                                                                       \
        asm volatile("ld.global." INSTRUCTION " %0, [%1];" : CONSTRAINT(x) : "l"(p)); \
        return x;                                                                     \
    }
VOLTA_FA_LOAD(load_global1, unsigned, const void*, "=r", "u32")
VOLTA_FA_LOAD(load_int, int, const int*, "=r", "s32")
VOLTA_FA_LOAD(load_float, float, const float*, "=f", "f32")
VOLTA_FA_LOAD(load_float_constant, float, const float*, "=f", "nc.f32")
#undef VOLTA_FA_LOAD
__device__ __forceinline__ uint2 load_global2(const void* p) {
    uint2 x;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
    return x;
}
__device__ __forceinline__ void load_global2_constant(uint2& x, const void* p) {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
}
// Stores 16 bytes as one instruction: ptxas splits some such stores of C++ into four.
__device__ __forceinline__ void store_global4(void* p, const uint4& x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// Loads and atomics that name the global address space, which the compiler cannot infer after keep_in_register(). load_global4
// caches in L1 (PTX's default), _constant takes the read-only path (.nc), _l2 caches in L2 only (.cg). add_global is an atomic
// addition without a return value.
__device__ __forceinline__ float4 load_global4(const float* p) {
    float4 r;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(p));
    return r;
}
__device__ __forceinline__ float4 load_global4_constant(const float* p) {
    float4 r;
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(p));
    return r;
}
__device__ __forceinline__ float4 load_global4_l2(const float* p) {
    float4 r;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(p));
    return r;
}
__device__ __forceinline__ void add_global(float* p, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}

// ---- barriers -------------------------------------------------------------------------------------

// A barrier for all warps of the block, which may reach it at different places (masked and unmasked steps): not __syncthreads().
__device__ __forceinline__ void block_barrier() { asm volatile("bar.sync 0;" ::: "memory"); }
// Barriers number `barrier` (1 to 15) of some of a block's warps: `threads` threads in all. named_arrive() does not wait.
__device__ __forceinline__ void named_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Returns whether x is true in any of the threads.
__device__ __forceinline__ bool named_sync_or(int barrier, int threads, bool x) {
    int any;
    asm volatile(
        "{.reg .pred x, any;\n"
        "setp.ne.s32 x, %3, 0;\n"
        "bar.red.or.pred any, %1, %2, x;\n"
        "selp.s32 %0, 1, 0, any;}"
        : "=r"(any)
        : "r"(barrier), "r"(threads), "r"(static_cast<int>(x))
        : "memory");
    return any;
}

// ---- warps ----------------------------------------------------------------------------------------

// Returns the maximum over all lanes of the warp, which call it together.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane_mask = 16; lane_mask > 0; lane_mask /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane_mask));
    return x;
}
