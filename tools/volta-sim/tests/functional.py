"""Functional unit tests, on sm_70 and on sm_75: python tests/functional.py [name ...]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import volta_sim as vs

rng = np.random.default_rng(1)
TESTS = {}
#: what is compiled for
arch = "sm_70"


def test(f):
    TESTS[f.__name__] = f
    return f


def go(src, kernel, grid, block, args, smem=0, **kw):
    return vs.run(vs.compile(src, arch=arch, **kw), kernel, grid, block, smem, args, mode="functional")[0]


def close(a, b, tol=1e-6, what=""):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    e = np.abs(a - b) / np.maximum(1, np.abs(b))
    assert np.all(e <= tol), f"{what} max error {np.nanmax(e)} at {np.nanargmax(e)}: {a.flat[np.nanargmax(e)]} vs {b.flat[np.nanargmax(e)]}"


def same(a, b, what=""):
    assert np.array_equal(a, b), (
        f"{what}: {np.argwhere(np.asarray(a) != np.asarray(b))[:4]} {np.asarray(a)[np.asarray(a) != np.asarray(b)][:4]} {np.asarray(b)[np.asarray(a) != np.asarray(b)][:4]}"
    )


@test
def vector_add():
    n = 1000
    a, b = rng.standard_normal(n).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    o = go(
        """extern "C" __global__ void k(const float*a,const float*b,float*c,int n){
        int i=blockIdx.x*blockDim.x+threadIdx.x; if(i<n) c[i]=a[i]+b[i]; }""",
        "k",
        (8,),
        (128,),
        [a, b, np.zeros(n, np.float32), n],
    )
    same(o[2], a + b)


@test
def out_of_bounds_is_reported():
    try:
        go("""extern "C" __global__ void k(float*c){ c[threadIdx.x+1]=1; }""", "k", (1,), (32,), [np.zeros(32, np.float32)])
    except RuntimeError as e:
        assert "lane 31" in str(e) and "global store" in str(e), e
        return
    raise AssertionError("no error")


@test
def shfl_reduction():
    a = rng.integers(-1000, 1000, 4096).astype(np.int32)
    o = go(
        """extern "C" __global__ void k(const int*a,int*c){
        __shared__ int s[32]; int t=threadIdx.x, v=a[blockIdx.x*256+t];
        for(int o=16;o;o>>=1) v+=__shfl_xor_sync(~0u,v,o);
        if((t&31)==0) s[t>>5]=v; __syncthreads();
        if(t<32){ v=t<8?s[t]:0; for(int o=4;o;o>>=1) v+=__shfl_down_sync(~0u,v,o); if(t==0) c[blockIdx.x]=v; } }""",
        "k",
        (16,),
        (256,),
        [a, np.zeros(16, np.int32)],
    )
    same(o[1], a.reshape(16, 256).sum(1))


@test
def scan_shfl_up_idx():
    a = rng.integers(0, 100, 64).astype(np.int32)
    o = go(
        """extern "C" __global__ void k(int*a,int*b){ int t=threadIdx.x,v=a[t];
        for(int o=1;o<32;o*=2){int q=__shfl_up_sync(~0u,v,o); if((t&31)>=o) v+=q;} a[t]=v;
        b[t]=__shfl_sync(~0u,v,(t*7)&31,8)+__shfl_xor_sync(~0u,v,3,16)+__shfl_down_sync(~0u,v,5,8); }""",
        "k",
        (1,),
        (64,),
        [a, np.zeros(64, np.int32)],
    )
    c = np.concatenate([np.cumsum(a[:32]), np.cumsum(a[32:])])
    same(o[0], c)
    e = []
    for t in range(64):
        w, l = t // 32 * 32, t % 32
        idx = w + l // 8 * 8 + ((t * 7) & 31) % 8
        dn = l + 5 if l % 8 + 5 < 8 else l
        e.append(c[idx] + c[w + (l ^ 3)] + c[w + dn])
    same(o[1], np.array(e))


@test
def bit_tricks():
    n = 256
    x, y = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32), rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)
    x[:4] = [0, 1, 0xFFFFFFFF, 0x80000000]
    y[0] = 0
    src = """extern "C" __global__ void k(const unsigned*a,const unsigned*b,unsigned*o){ int t=threadIdx.x; unsigned x=a[t],y=b[t]; o+=t*20;
      o[0]=__popc(x); o[1]=__clz(y); o[2]=__ffs(x); o[3]=__brev(y); o[4]=__byte_perm(x,y,0x3715); o[5]=__funnelshift_l(x,y,t);
      o[6]=__funnelshift_r(x,y,t); o[7]=min((int)x,(int)y); o[8]=max(x,y); o[9]=abs((int)x); o[10]=__mulhi((int)x,(int)y); o[11]=__umulhi(x,y);
      o[12]=x/(y|1); o[13]=(int)x/(int)((y>>7)|1); o[14]=x%((y>>20)|1); o[15]=(x&y)|(~x&(y>>3)); o[16]=x<<(y&31); o[17]=(int)x>>(y&31);
      o[18]=__byte_perm(x,y,t*37); o[19]=(x>y)+2*((int)x>(int)y)+4*(x==y); }"""
    o = go(src, "k", (1,), (n,), [x, y, np.zeros(n * 20, np.uint32)])[2].reshape(n, 20)
    M = 2**32 - 1

    def s(v):
        return v - 2**32 if v >= 2**31 else v

    for i in range(n):
        a, b = int(x[i]), int(y[i])
        cat = (b << 32) | a
        bp = lambda sel: (
            sum(((cat >> (8 * ((sel >> (4 * j)) & 7))) & 255) << (8 * j) for j in range(4))
            if not any((sel >> (4 * j)) & 8 for j in range(4))
            else None
        )
        e = [
            bin(a).count("1"),
            32 - b.bit_length(),
            (a & -a).bit_length(),
            int(f"{b:032b}"[::-1], 2),
            bp(0x3715),
            ((cat << (i & 31)) >> 32) & M,
            (cat >> (i & 31)) & M,
            min(s(a), s(b)) & M,
            max(a, b),
            abs(s(a)) & M,
            ((s(a) * s(b)) >> 32) & M,
            (a * b) >> 32,
            a // (b | 1),
            int(abs(s(a)) // ((b >> 7) | 1)) * (1 if s(a) >= 0 else -1) & M,
            a % ((b >> 20) | 1),
            (a & b) | (~a & (b >> 3)) & M,
            (a << (b & 31)) & M,
            (s(a) >> (b & 31)) & M,
            bp(i * 37 & 0x7777),
            (a > b) + 2 * (s(a) > s(b)) + 4 * (a == b),
        ]
        for j in range(20):
            if e[j] is not None and not (j == 18 and (i * 37) & 0x8888):
                assert int(o[i, j]) == e[j], (i, j, hex(a), hex(b), hex(o[i, j]), hex(e[j]))


@test
def int64():
    n = 128
    x, y = rng.integers(-(2**62), 2**62, n), rng.integers(-(2**62), 2**62, n)
    y[:40] >>= 40
    src = """extern "C" __global__ void k(const long long*a,const long long*b,long long*o){ int t=threadIdx.x; long long x=a[t],y=b[t]; o+=t*10;
      o[0]=x+y;o[1]=x-y;o[2]=x*y;o[3]=x/(y|1);o[4]=(unsigned long long)x%(unsigned long long)(y|1);o[5]=x<<(t&63);o[6]=x>>(t&63);o[7]=(unsigned long long)x>>(t&63);
      o[8]=(x<y)+2*((unsigned long long)x<(unsigned long long)y)+4*(x==y)+8*(x>=y); o[9]=__mul64hi(x,y); }"""
    o = go(src, "k", (1,), (n,), [x, y, np.zeros(n * 10, np.int64)])[2].reshape(n, 10)
    U = 2**64
    w = lambda v: (v + 2**63) % U - 2**63
    for i in range(n):
        a, b = int(x[i]), int(y[i])
        d = b | 1
        q = abs(a) // abs(d) * (1 if (a < 0) == (d < 0) else -1)
        e = [
            w(a + b),
            w(a - b),
            w(a * b),
            q,
            w((a % U) % (d % U)),
            w(a << (i & 63)),
            a >> (i & 63),
            w((a % U) >> (i & 63)),
            (a < b) + 2 * (a % U < b % U) + 4 * (a == b) + 8 * (a >= b),
            (a * b) >> 64,
        ]
        for j in range(10):
            assert int(o[i, j]) == e[j], (i, j, a, b, int(o[i, j]), e[j])


@test
def half_float_conversion():
    f = np.concatenate(
        [
            rng.standard_normal(900).astype(np.float32) * 10.0 ** rng.integers(-9, 6, 900),
            [0, -0.0, np.inf, -np.inf, 65504, 65519, 65520, 65536, 6e-8, 2.9e-8, 3e-8, 1e-40],
        ]
    ).astype(np.float32)
    f = f[:900]
    h = np.arange(900, dtype=np.uint16) * 71
    src = """#include <cuda_fp16.h>
    extern "C" __global__ void k(const float*f,unsigned short*o,const unsigned short*h,float*g,const float2*f2,unsigned*o2,const unsigned*h2,float2*g2){
      int i=blockIdx.x*100+threadIdx.x; o[i]=__half_as_ushort(__float2half_rn(f[i])); g[i]=__half2float(__ushort_as_half(h[i]));
      if(i<450){ half2 t=__float22half2_rn(f2[i]); o2[i]=*(unsigned*)&t; g2[i]=__half22float2(*(half2*)&h2[i]); } }"""
    o = go(
        src,
        "k",
        (9,),
        (100,),
        [
            f,
            np.zeros(900, np.uint16),
            h,
            np.zeros(900, np.float32),
            f.copy(),
            np.zeros(450, np.uint32),
            h.copy(),
            np.zeros(900, np.float32),
        ],
    )
    with np.errstate(over="ignore"):
        e = f.astype(np.float16).view(np.uint16)
    same(o[1], e)
    same(o[5].view(np.uint16), e)
    hf = h.view(np.float16).astype(np.float32)
    ok = ~np.isnan(hf)
    same(o[3][ok], hf[ok])
    same(o[7][ok], hf[ok])


@test
def half2_arithmetic():
    n = 512
    a, b, c = [rng.standard_normal(n).astype(np.float16) for _ in range(3)]
    src = """#include <cuda_fp16.h>
    extern "C" __global__ void k(const half2*a,const half2*b,const half2*c,half2*o,int*p){ int t=threadIdx.x; half2 x=a[t],y=b[t],z=c[t]; o+=t*7;
      o[0]=__hadd2(x,y);o[1]=__hmul2(x,y);o[2]=__hfma2(x,y,z);o[3]=__hsub2(x,__half2half2(__low2half(y)));o[4]=__hmul2(x,__half2half2(__high2half(z)));
      o[5]=h2exp2(x); o[6]=__halves2half2(__high2half(x),__low2half(y)); p[t]=__hgt(__low2half(x),__high2half(y))+2*__hbgt2(x,y); }"""
    o = go(src, "k", (1,), (n // 2,), [a, b, c, np.zeros(n * 7, np.float16), np.zeros(n // 2, np.int32)])
    r = o[3].reshape(n // 2, 7, 2)
    A, B, C = [v.reshape(-1, 2) for v in (a, b, c)]
    same(r[:, 0], A + B)
    same(r[:, 1], A * B)
    same(r[:, 2], (A.astype(np.float64) * B + C).astype(np.float16))
    same(r[:, 3], A - B[:, :1])
    same(r[:, 4], A * C[:, 1:])
    close(r[:, 5], np.exp2(A.astype(np.float64)), 2e-3)
    same(r[:, 6, 0], A[:, 1])
    same(r[:, 6, 1], B[:, 0])
    same(o[4], (A[:, 0] > B[:, 1]) + 2 * np.all(A > B, axis=1))


@test
def float_functions():
    n = 256
    a = (rng.standard_normal(n) * 4).astype(np.float32)
    b = (np.abs(rng.standard_normal(n)) * 10.0 ** rng.integers(-20, 20, n)).astype(np.float32)
    src = """extern "C" __global__ void k(const float*A,const float*B,float*o,int*p){ int t=threadIdx.x; float a=A[t],b=B[t]; o+=t*16;
      o[0]=exp2f(a);o[1]=expf(a);o[2]=logf(b);o[3]=sqrtf(b);o[4]=rsqrtf(b);o[5]=a/b;o[6]=__fdividef(a,b);o[7]=tanhf(a);o[8]=sinf(a);o[9]=cosf(a*300);o[10]=fmaf(a,b,-a);
      o[11]=fminf(a,b);o[12]=fmaxf(a,-b);o[13]=truncf(a)+floorf(a)*100;o[14]=__saturatef(a);o[15]=(float)(a/(double)b);
      p[t]=(int)a+1000*__float2int_rn(a)+1000000*(int)floorf(a)+(a<b?1<<30:0); }"""
    o = go(src, "k", (1,), (n,), [a, b, np.zeros(n * 16, np.float32), np.zeros(n, np.int32)])
    r = o[2].reshape(n, 16)
    A, B = a.astype(np.float64), b.astype(np.float64)
    rel = lambda j, e, t: close(r[:, j] / e, np.ones(n), t, f"column {j}")
    rel(0, np.exp2(A), 1e-6)
    rel(1, np.exp(A), 1e-6)
    close(r[:, 2], np.log(B), 1e-6)
    rel(3, np.sqrt(B), 1e-7)
    rel(4, 1 / np.sqrt(B), 1e-6)
    rel(5, A / B, 1.2e-7)
    rel(6, A / B, 1e-6)
    close(r[:, 7], np.tanh(A), 1e-6)
    close(r[:, 8], np.sin(A), 1e-6)
    close(r[:, 9], np.cos((a * np.float32(300)).astype(np.float64)), 1e-6)
    rel(10, A * B - A, 2e-5)
    same(r[:, 11], np.minimum(a, b))
    same(r[:, 12], np.maximum(a, -b))
    same(r[:, 13], np.trunc(a) + np.floor(a) * np.float32(100))
    same(r[:, 14], np.clip(a, 0, 1))
    rel(15, A / B, 1e-7)
    same(
        o[3],
        np.trunc(a).astype(np.int32)
        + 1000 * np.rint(a).astype(np.int32)
        + 1000000 * np.floor(a).astype(np.int32)
        + np.where(a < b, 1 << 30, 0).astype(np.int32),
    )


@test
def shared_transpose():
    a = rng.standard_normal((64, 64)).astype(np.float32)
    src = """extern "C" __global__ void k(const float*a,float*b){ __shared__ float s[32][33]; int x=threadIdx.x,y=threadIdx.y;
      for(int j=0;j<32;j+=8) s[y+j][x]=a[(blockIdx.y*32+y+j)*64+blockIdx.x*32+x]; __syncthreads();
      for(int j=0;j<32;j+=8) b[(blockIdx.x*32+y+j)*64+blockIdx.y*32+x]=s[x][y+j]; }"""
    o = go(src, "k", (2, 2), (32, 8), [a, np.zeros((64, 64), np.float32)])
    same(o[1], a.T)


@test
def vector_width_access():
    a = rng.integers(0, 256, 4096).astype(np.uint8)
    src = """extern "C" __global__ void k(const unsigned char*a,unsigned char*b,int*q){ extern __shared__ uint4 s[]; int t=threadIdx.x;
      s[t]=((const uint4*)a)[t]; __syncthreads(); ((uint2*)b)[t]=((uint2*)s)[255-t]; ((uint4*)b)[128+t]=s[(t*5)&255];
      const signed char*c=(const signed char*)s; const short*h=(const short*)s; q[t]=c[t*3]*1000+h[t]+((unsigned char*)s)[t]+((unsigned short*)s)[t*2]; }"""
    o = go(src, "k", (1,), (256,), [a, np.zeros(2048 + 4096, np.uint8), np.zeros(256, np.int32)], smem=4096)
    same(o[1][:2048].reshape(256, 8), a.reshape(512, 8)[255::-1])
    same(o[1][2048:].reshape(256, 16), a.reshape(256, 16)[(np.arange(256) * 5) & 255])
    t = np.arange(256)
    same(o[2], a.view(np.int8)[t * 3].astype(np.int32) * 1000 + a.view(np.int16)[t] + a[t] + a.view(np.uint16)[t * 2])


@test
def divergence():
    a = np.arange(256, dtype=np.int32)
    src = """__device__ __noinline__ int f(int x,int k){ return k>0 ? f(x*3+1,k-1)+1 : x; }
    extern "C" __global__ void k(int*a,int*b){ int t=threadIdx.x,v=a[t]; 
      switch(v%9){case 0:v+=1;break;case 1:v*=3;break;case 2:v-=7;break;case 3:v^=5;break;case 4:v=v*v;break;case 5:v=-v;break;case 6:v+=__popc(v);break;}
      int n=0; while(v!=1 && n<(t&15)){ if(v&1) v=3*v+1; else v/=2; n++; if(v==77) break; }
      if(t%3==0){ if(t%2) v+=100; else for(int i=0;i<t%7;i++) v+=i*i; }
      v+=f(t,t&3); a[t]=v; b[t]=__ballot_sync(~0u,v&1)+__popc(__match_any_sync(~0u,v%4)); if(t>200) return; __syncthreads(); atomicAdd(&b[256],1); }"""
    o = go(src, "k", (1,), (256,), [a, np.zeros(257, np.int32)])

    def f(x, k):
        return f(x * 3 + 1, k - 1) + 1 if k > 0 else x

    e = []
    for t in range(256):
        v = t
        r = v % 9
        v = [v + 1, v * 3, v - 7, v ^ 5, v * v, -v, v + bin(v).count("1"), v, v][r]
        n = 0
        while v != 1 and n < (t & 15):
            v = 3 * v + 1 if v & 1 else int(v / 2)
            n += 1
            if v == 77:
                break
        if t % 3 == 0:
            v += 100 if t % 2 else sum(i * i for i in range(t % 7))
        e.append(v + f(t, t & 3))
    same(o[0], np.array(e))
    assert o[1][256] == 201
    for w in range(8):
        b = sum((e[w * 32 + l] & 1) << l for l in range(32))
        m = [int(np.fmod(x, 4)) for x in e[w * 32 : w * 32 + 32]]
        for l in range(32):
            assert int(o[1][w * 32 + l]) & 0xFFFFFFFF == (b + m.count(m[l])) & 0xFFFFFFFF


@test
def atomics():
    src = """__device__ int g; __constant__ float cst[8]={1,2,3,4,5,6,7,8};
    extern "C" __global__ void k(int*a,float*f,unsigned long long*p){ __shared__ int s; __shared__ float sf; int t=threadIdx.x; if(t==0){s=0;sf=0;} __syncthreads();
      atomicAdd(&a[0],t); atomicMax(&a[1],t*7%101); atomicMin(&a[2],-(int)(t*7%103)); atomicOr(&a[3],1<<(t&31)); atomicXor(&a[4],t); atomicAdd(&f[0],0.5f); atomicAdd(p,(unsigned long long)t<<33);
      atomicAdd(&s,t); atomicAdd(&sf,cst[t&7]); int o; do{ o=a[6]; }while(atomicCAS(&a[6],o,o+2)!=o);
      atomicInc((unsigned*)&a[7],9); atomicAdd(&g,1); __syncthreads(); if(t==0){ atomicAdd(&a[5],s); f[1+blockIdx.x]=sf; } 
      a[8]=__syncthreads_count(t&1)+1000*__syncthreads_or(t==5)+10000*__syncthreads_and(t<999); if(t==0) { int old=atomicExch(&a[9],7); a[10+blockIdx.x]=old; } }"""
    a = np.zeros(16, np.int32)
    a[9] = 3
    o = go(src, "k", (4,), (128,), [a, np.zeros(5, np.float32), np.zeros(1, np.uint64)])
    r = o[0]
    S = 128 * 127 // 2
    assert (
        r[0] == 4 * S
        and r[1] == max(t * 7 % 101 for t in range(128))
        and r[2] == -max(t * 7 % 103 for t in range(128))
        and r[3] == -1
        and r[4] == 0
    ), r
    assert (
        r[5] == 4 * S and r[6] == 1024 and r[7] == 512 % 10 and r[8] == 64 + 1000 + 10000 and r[9] == 7 and sorted(r[10:14]) == [3, 7, 7, 7]
    ), r
    assert o[1][0] == 256 and np.all(o[1][1:] == 36 * 16) and o[2][0] == 4 * S << 33


@test
def named_barriers():
    src = """extern "C" __global__ void k(int*o){ __shared__ int s[64]; int t=threadIdx.x;
      if(t<64){ for(int i=0;i<10;i++){ s[t]=t*i; asm volatile("bar.sync 1, 128;"); asm volatile("bar.sync 2, 128;"); } }
      else { int v=0; for(int i=0;i<10;i++){ asm volatile("bar.sync 1, 128;"); v+=s[127-t]; asm volatile("bar.sync 2, 128;"); } o[t-64]=v; } }"""
    o = go(src, "k", (2,), (128,), [np.zeros(64, np.int32)])
    same(o[0], 45 * (63 - np.arange(64)))


@test
def barriers_in_role_branches():
    # compiles to BRA.CONV in front of each barrier
    n = 3
    a = rng.standard_normal(64 * n).astype(np.float32)
    for quantum in (1, 20000):
        src = """extern "C" __global__ void k(const float*a,float*b,int n){ extern __shared__ float s[]; int t=threadIdx.x;
            if (t < 64) { for(int i=0;i<n;i++){ s[t]=a[t+i*64]; __syncwarp(); s[64+t]=s[t^1]; __syncthreads(); __syncthreads(); } }
            else { for(int i=0;i<n;i++){ __syncthreads(); b[t-64+i*64]=s[t]*3; __syncthreads(); } } }"""
        o = vs.run(vs.compile(src), "k", (1,), (128,), 512, [a, np.zeros_like(a), n], mode="functional", options=["--quantum", quantum])[0]
        same(o[1], a.reshape(-1, 2)[:, ::-1].reshape(-1) * np.float32(3))


@test
def spills():
    src = """extern "C" __global__ void k(const float*a,float*o){ float v[64]; int t=threadIdx.x;
      #pragma unroll
      for(int i=0;i<64;i++) v[i]=a[i*64+t]; __syncthreads();
      #pragma unroll
      for(int r=0;r<3;r++){
      #pragma unroll
      for(int i=0;i<64;i++) v[i]=v[i]*v[(i*7+3)&63]+v[(i+1)&63]; }
      #pragma unroll
      for(int i=0;i<64;i++) o[i*64+t]=v[i]; }"""
    a = (rng.standard_normal((64, 64)) * 0.3).astype(np.float32)
    out, rep = vs.run(vs.compile(src, options=["--maxrregcount=32"]), "k", (1,), (64,), 0, [a, np.zeros_like(a)], mode="functional")
    assert rep["spill_insts_static"] > 20, rep["spill_insts_static"]
    v = [a[i].astype(np.float64) for i in range(64)]
    for _ in range(3):
        for i in range(64):
            v[i] = v[i] * v[(i * 7 + 3) & 63] + v[(i + 1) & 63]
    close(out[1], np.stack(v), 1e-4)


def mma_layout(kind, layout, t):
    """(row, column or k) of each element held by thread t of a quad-pair."""
    if kind == "A":
        return [(t, v) for v in range(4)] if layout == "row" else [(4 * (t // 4) + v, t % 4) for v in range(4)]
    if kind == "B":  # (k, n)
        return [(v, t) for v in range(4)] if layout == "col" else [(t % 4, 4 * (t // 4) + v) for v in range(4)]
    if kind == "C16":
        return [(t, v) for v in range(8)]
    return [((t & 1) + (v & 2) + 4 * (t >> 2), (v & 1) + (t & 2) + (v & 4)) for v in range(8)]


def mma_case(al, bl, f32):
    ct, n = ("f32", 8) if f32 else ("f16", 4)
    cons = "f" if f32 else "r"
    T = "float" if f32 else "unsigned"
    d = ",".join(f"%{i}" for i in range(n))
    c = ",".join(f"%{n + 4 + i}" for i in range(n))
    src = f"""extern "C" __global__ void k(const unsigned*A,const unsigned*B,const {T}*C,{T}*D){{ int t=threadIdx.x; {T} c[{n}],d[{n}];
      for(int i=0;i<{n};i++) c[i]=C[t*{n}+i];
      asm volatile("mma.sync.aligned.m8n8k4.{al}.{bl}.{ct}.f16.f16.{ct} {{{d}}},{{%{n},%{n + 1}}},{{%{n + 2},%{n + 3}}},{{{c}}};" :
        {",".join(f'"={cons}"(d[{i}])' for i in range(n))} : "r"(A[t*2]),"r"(A[t*2+1]),"r"(B[t*2]),"r"(B[t*2+1]),{",".join(f'"{cons}"(c[{i}])' for i in range(n))});
      for(int i=0;i<{n};i++) D[t*{n}+i]=d[i]; }}"""
    A, B = rng.standard_normal((4, 8, 4)).astype(np.float16), rng.standard_normal((4, 4, 8)).astype(np.float16)
    cd = np.float32 if f32 else np.float16
    C = rng.standard_normal((4, 8, 8)).astype(cd)
    a, b, cc = np.zeros((32, 4), np.float16), np.zeros((32, 4), np.float16), np.zeros((32, 8), cd)
    lane = lambda q, t: 4 * q + t % 4 + (16 if t >= 4 else 0)
    for q in range(4):
        for t in range(8):
            l = lane(q, t)
            for v, (m, k) in enumerate(mma_layout("A", al, t)):
                a[l, v] = A[q, m, k]
            for v, (k, nn) in enumerate(mma_layout("B", bl, t)):
                b[l, v] = B[q, k, nn]
            for v, (m, nn) in enumerate(mma_layout("C32" if f32 else "C16", "", t)):
                cc[l, v] = C[q, m, nn]
    o = go(src, "k", (1,), (32,), [a, b, cc, np.zeros_like(cc)])[3]
    ref = np.einsum("qmk,qkn->qmn", A.astype(np.float64), B.astype(np.float64)) + C
    for q in range(4):
        for t in range(8):
            for v, (m, nn) in enumerate(mma_layout("C32" if f32 else "C16", "", t)):
                assert abs(o[lane(q, t), v] - ref[q, m, nn]) < (1e-5 if f32 else 6e-3), (al, bl, f32, q, t, v)


@test
def mma_m8n8k4():
    for f32 in (True, False):
        for al in ("row", "col"):
            for bl in ("row", "col"):
                mma_case(al, bl, f32)


@test
def wmma_m16n16k16():
    for al in ("row_major", "col_major"):
        for bl in ("row_major", "col_major"):
            for acc in ("float", "half"):
                src = f"""#include <mma.h>
                using namespace nvcuda; extern "C" __global__ void k(const half*A,const half*B,{acc}*C){{
                  wmma::fragment<wmma::matrix_a,16,16,16,half,wmma::{al}> a; wmma::fragment<wmma::matrix_b,16,16,16,half,wmma::{bl}> b;
                  wmma::fragment<wmma::accumulator,16,16,16,{acc}> c; wmma::load_matrix_sync(c,C,16,wmma::mem_row_major);
                  for(int i=0;i<2;i++){{ wmma::load_matrix_sync(a,A+i*256,16); wmma::load_matrix_sync(b,B+i*256,16); wmma::mma_sync(c,a,b,c); }}
                  wmma::store_matrix_sync(C,c,16,wmma::mem_row_major); }}"""
                A, B = rng.standard_normal((2, 16, 16)).astype(np.float16), rng.standard_normal((2, 16, 16)).astype(np.float16)
                dt = np.float32 if acc == "float" else np.float16
                C = rng.standard_normal((16, 16)).astype(dt)
                o = go(src, "k", (1,), (32,), [A, B, C])[2]
                a = A.astype(np.float64) if al[0] == "r" else A.astype(np.float64).transpose(0, 2, 1)
                b = B.astype(np.float64) if bl[0] == "r" else B.astype(np.float64).transpose(0, 2, 1)
                close(o, C + (a @ b).sum(0), 2e-6 if acc == "float" else 8e-3, f"{al} {bl} {acc}")


if __name__ == "__main__":
    names = sys.argv[1:] or TESTS
    bad = 0
    for arch in ("sm_70", "sm_75"):
        for n in names:
            try:
                TESTS[n]()
                print(f"ok    {arch} {n}")
            except Exception as e:
                bad += 1
                print(f"FAIL  {arch} {n}: {type(e).__name__} {str(e)[:600]}")
    sys.exit(bad)
