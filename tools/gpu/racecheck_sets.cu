// Shows a false positive of compute-sanitizer's racecheck: sets of warps that wait at barriers of their own, each a different
// number of times.
//
//   nvcc -arch=sm_90 -o /tmp/sets tools/gpu/racecheck_sets.cu && compute-sanitizer --tool racecheck /tmp/sets 5 3
//
// There is no race: one set's data is read by the other only after __syncthreads(). racecheck nevertheless reports hazards
// across __syncthreads() with 5 and 3 or 9 and 1 steps, and none with 4 and 4. It reports the same hazards for decode kernels of
// 64 rows with several such sets (csrc/decode/mainloop.cuh). Seen on an H200, 2026-11-21.
#include <cstdio>
#include <cstdlib>

constexpr int kSets = 2, kThreads = 128;

__global__ void sets(float* out, int first_steps, int second_steps) {
    __shared__ float buffers[kSets][2][kThreads];
    __shared__ float parts[kSets * kThreads];
    const int set = threadIdx.x / kThreads, lane = threadIdx.x % kThreads, steps = set ? second_steps : first_steps;
    float sum = 0;
    for (int i = 0; i < steps; i++) {
        buffers[set][i % 2][lane] = i + lane;
        asm volatile("bar.sync %0, %1;" ::"r"(1 + set), "n"(kThreads) : "memory");
        sum += buffers[set][i % 2][kThreads - 1 - lane];
    }
    __syncthreads();
    parts[threadIdx.x] = sum;
    __syncthreads();
    out[threadIdx.x] = parts[kSets * kThreads - 1 - threadIdx.x];
}

int main(int argc, char** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s STEPS_OF_THE_FIRST_SET STEPS_OF_THE_SECOND\n", argv[0]);
        return 2;
    }
    float* out;
    if (cudaMalloc(&out, kSets * kThreads * sizeof(float)) != cudaSuccess) return 1;
    sets<<<4, kSets * kThreads>>>(out, atoi(argv[1]), atoi(argv[2]));
    return cudaDeviceSynchronize() != cudaSuccess;
}
