// Opens libraries as a program without Python does, and has torch's dispatcher call volta_fa. tools/torch_matrix.py compiles it and
// runs it with the C and C++ libraries of an older Linux:
//
//     load LIBRARY ... SHIM       // torch's libraries, then the shim (volta_fa's library for that torch)
//
// The call is merge_attention_states of two equal states. It goes through the shim, Rust and ATen, and back. The program declares
// functions of torch's C interface for AOTInductor, which all supported releases have. Without a header it serves all of them.

#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int32_t (*CreateTensor)(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t, int32_t, void**);
typedef int32_t (*CallDispatcher)(const char*, const char*, uint64_t*);
typedef int32_t (*DataPointer)(void*, void**);
typedef int32_t (*Constant)(void);

static void* torch;

static void* function(const char* name) {
    void* found = dlsym(torch, name);
    if (!found) fprintf(stderr, "%s\n", dlerror());
    return found;
}

int main(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        void* library = dlopen(argv[i], RTLD_NOW | RTLD_GLOBAL);
        if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
        if (strstr(argv[i], "libtorch_cpu.so")) torch = library;
    }
    CreateTensor create = (CreateTensor)function("aoti_torch_create_tensor_from_blob");
    CallDispatcher call = (CallDispatcher)function("aoti_torch_call_dispatcher");
    DataPointer data = (DataPointer)function("aoti_torch_get_data_ptr");
    Constant float32 = (Constant)function("aoti_torch_dtype_float32"), cpu = (Constant)function("aoti_torch_device_type_cpu");
    if (!create || !call || !data || !float32 || !cpu) return 1;

    float out[] = {1, 2, 3, 4, 5, 6, 7, 8}, lse[] = {0.5f, -0.5f};
    // (batch, seqlen_q, nheads, headdim_v) and (batch, nheads, seqlen_q)
    const int64_t out_sizes[] = {1, 2, 1, 4}, out_strides[] = {8, 4, 4, 1}, lse_sizes[] = {1, 1, 2}, lse_strides[] = {2, 2, 1};
    uint64_t stack[4];  // arguments out_a, softmax_lse_a, out_b, softmax_lse_b; then the results out, softmax_lse
    for (int i = 0; i < 4; ++i) {
        void* tensor;
        if (i % 2 == 0 && create(out, 4, out_sizes, out_strides, 0, float32(), cpu(), 0, &tensor)) return 1;
        if (i % 2 == 1 && create(lse, 3, lse_sizes, lse_strides, 0, float32(), cpu(), 0, &tensor)) return 1;
        stack[i] = (uint64_t)tensor;
    }
    float *merged, *merged_lse;
    if (call("volta_fa::merge_attention_states", "", stack)) return fprintf(stderr, "the call failed\n"), 1;
    if (data((void*)stack[0], (void**)&merged) || data((void*)stack[1], (void**)&merged_lse)) return 1;
    for (int i = 0; i < 8; ++i) {
        if (fabsf(merged[i] - out[i]) > 1e-5f) return fprintf(stderr, "out[%d] is %g, not %g\n", i, merged[i], out[i]), 1;
    }
    // equal states keep their out and double the sum of exponentials: softmax_lse grows by ln 2
    for (int i = 0; i < 2; ++i) {
        if (fabsf(merged_lse[i] - lse[i] - 0.693147f) > 1e-5f)
            return fprintf(stderr, "softmax_lse[%d] is %g\n", i, merged_lse[i]), 1;
    }
    return 0;
}
