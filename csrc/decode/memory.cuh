// Inline PTX of the decode loaders: a register hint, and a predicated global load.
#pragma once

namespace decode {

// Keeps x in a register: the compiler cannot recompute it from thread indices.
__device__ __forceinline__ void keep_in_register(int& x) { asm volatile("" : "+r"(x)); }

// Loads Words words if the lane has more than Column columns, else leaves x as it is. Volatile, because the compiler would move
// the load down to its first use.
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

}  // namespace decode
