// Implements, with ATen, the C functions of tch (Rust's binding of PyTorch) that src/ uses. The crate torch-sys would compile
// thousands, in minutes, and bind Rust to one torch release; its feature doc-only prevents that. If src/ uses a function that this
// file lacks, tools/build_shims.py fails with its name. tests/test_package.py compares the signatures with those of torch-sys.
//
// No exception crosses into Rust. Its text stays for get_and_reset_last_err, which tch calls after each of these functions.
// Prefixes are torch-sys's: at_ for handwritten functions of tensors, ats_ for scalars, atg_ for those generated from ATen's.
// atg_ functions write their results, new tensors that Rust owns, to `out`.

#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/threshold.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using at::Scalar;
using at::Tensor;

// Text of this thread's last error that tch has not fetched yet; from malloc, because tch frees it.
thread_local char* last_error = nullptr;

void keep_error(const char* text) { std::free(std::exchange(last_error, strdup(text))); }

// Returns the result of `body`. After an exception, keeps the error and returns `failed`.
template <class Body, class Value>
Value guarded(Value failed, const Body& body) noexcept {
    try {
        return body();
    } catch (const std::exception& error) {
        keep_error(error.what());
    } catch (...) {
        keep_error("unknown C++ exception");
    }
    return failed;
}

template <class Body>
void guarded(const Body& body) noexcept {
    guarded(0, [&] { return body(), 0; });
}

// Gives a new tensor to Rust.
template <class Body>
Tensor* owned(const Body& body) noexcept {
    return guarded(static_cast<Tensor*>(nullptr), [&] { return new Tensor(body()); });
}

template <class Body>
void give(Tensor** out, const Body& body) noexcept {
    *out = owned(body);
}

// Gives several new tensors to Rust: all or, after an exception, none.
template <class Body>
void give_all(Tensor** out, const Body& body) noexcept {
    guarded([&] {
        std::apply(
            [&](auto... made) {
                std::unique_ptr<Tensor> tensors[] = {std::make_unique<Tensor>(std::move(made))...};
                for (auto& tensor : tensors) *out++ = tensor.release();
            },
            body());
    });
}

// Conversions from tch's types to ATen's.

std::optional<Tensor> optional_tensor(const Tensor* t) { return t ? std::optional(*t) : std::nullopt; }

at::IntArrayRef list(const int64_t* data, int length) { return {data, static_cast<size_t>(length)}; }

at::OptionalIntArrayRef optional_list(const int64_t* data, int length) {
    return data ? at::OptionalIntArrayRef(list(data, length)) : std::nullopt;
}

c10::List<std::optional<Tensor>> optional_tensors(Tensor* const* data, int length) {
    c10::List<std::optional<Tensor>> tensors;
    for (int i = 0; i < length; ++i) tensors.push_back(data[i] ? std::optional(*data[i]) : std::nullopt);
    return tensors;
}

std::vector<Tensor> all_of(Tensor* const* data, int length) {
    std::vector<Tensor> tensors;
    tensors.reserve(static_cast<size_t>(length));
    for (int i = 0; i < length; ++i) tensors.push_back(*data[i]);
    return tensors;
}

at::ScalarType kind_of(int kind) { return static_cast<at::ScalarType>(kind); }

std::optional<at::ScalarType> optional_kind(int kind) { return kind < 0 ? std::nullopt : std::optional(kind_of(kind)); }

std::optional<double> number(double value, int8_t is_none) { return is_none ? std::nullopt : std::optional(value); }

// tch numbers CUDA devices from 0 and others by negative numbers, of which the library only uses the CPU's.
constexpr int kCpu = -1;

at::Device device_of(int device) {
    TORCH_CHECK(device >= kCpu, "no CPU or CUDA device: ", device);
    return device == kCpu ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device));
}

at::TensorOptions options(int kind, int device) { return at::TensorOptions(device_of(device)).dtype(kind_of(kind)); }

void check_element_size(const Tensor& t, size_t bytes) {
    TORCH_CHECK(static_cast<size_t>(t.element_size()) == bytes, "elements of ", t.element_size(), " bytes, taken for ", bytes);
}

}  // namespace

extern "C" {

char* get_and_reset_last_err() { return std::exchange(last_error, nullptr); }

Scalar* ats_int(int64_t value) {
    return guarded(static_cast<Scalar*>(nullptr), [&] { return new Scalar(value); });
}
Scalar* ats_float(double value) {
    return guarded(static_cast<Scalar*>(nullptr), [&] { return new Scalar(value); });
}
void ats_free(Scalar* self) { delete self; }

// ---- Properties of a tensor. ----

Tensor* at_shallow_clone(Tensor* self) {
    return owned([&] { return *self; });
}
void at_free(Tensor* self) { delete self; }

size_t at_dim(Tensor* self) {
    return guarded(size_t{0}, [&] { return static_cast<size_t>(self->dim()); });
}
void at_shape(Tensor* self, int64_t* values) {
    guarded([&] { std::copy_n(self->sizes().data(), self->sizes().size(), values); });
}
void at_stride(Tensor* self, int64_t* values) {
    guarded([&] { std::copy_n(self->strides().data(), self->strides().size(), values); });
}
int at_scalar_type(Tensor* self) {
    return guarded(-1, [&] { return static_cast<int>(self->scalar_type()); });
}
int at_device(Tensor* self) {
    return guarded(kCpu, [&] {
        const at::Device device = self->device();
        TORCH_CHECK(device.is_cpu() || device.is_cuda(), "a tensor on ", device);
        return device.is_cpu() ? kCpu : static_cast<int>(device.index());
    });
}
void* at_data_ptr(Tensor* self) {
    return guarded(static_cast<void*>(nullptr), [&] { return self->data_ptr(); });
}

// ---- Elements to and from Rust. ----

int64_t at_int64_value_at_indexes(Tensor* self, const int64_t* idx, int idx_len) {
    return guarded(int64_t{0}, [&] {
        Tensor element = *self;
        for (const int64_t i : list(idx, idx_len)) element = element.select(0, i);
        return element.item<int64_t>();
    });
}
Tensor* at_tensor_of_data(const void* data, const int64_t* dims, size_t ndims, size_t elt_size_in_bytes, int kind) {
    return owned([&] {
        Tensor made = at::empty({dims, ndims}, options(kind, kCpu));
        check_element_size(made, elt_size_in_bytes);
        if (made.numel() > 0) std::memcpy(made.data_ptr(), data, made.nbytes());
        return made;
    });
}
// Writes `data`, although torch-sys declares it const.
void at_copy_data(Tensor* self, const void* data, size_t numel, size_t elt_size_in_bytes) {
    guarded([&] {
        check_element_size(*self, elt_size_in_bytes);
        TORCH_CHECK(numel <= static_cast<size_t>(self->numel()), numel, " elements of a tensor that has ", self->numel());
        const Tensor source = self->to(at::kCPU).contiguous();
        if (numel > 0) std::memcpy(const_cast<void*>(data), source.data_ptr(), numel * elt_size_in_bytes);
    });
}
void at_copy_(Tensor* dst, Tensor* src) {
    guarded([&] { dst->copy_(*src); });
}

int at_get_num_threads() {
    return guarded(1, [] { return at::get_num_threads(); });
}

// The rest are functions of ATen with tch's parameters. FUNCTION(name, call, parameters...) defines atg_name, which gives the
// result of `call` to Rust, FUNCTIONS several results.

// clang-format off
#define FUNCTION(name, call, ...) \
    void atg_##name(Tensor** out, __VA_ARGS__) { give(out, [&] { return call; }); }
#define FUNCTIONS(name, call, ...) \
    void atg_##name(Tensor** out, __VA_ARGS__) { give_all(out, [&] { return call; }); }

// ---- Creation. ----

FUNCTION(arange, at::arange(*end, options(kind, device)), Scalar* end, int kind, int device)
FUNCTION(arange_start, at::arange(*start, *end, options(kind, device)), Scalar* start, Scalar* end, int kind, int device)
FUNCTION(empty, at::empty(list(size_data, size_len), options(kind, device)),
    const int64_t* size_data, int size_len, int kind, int device)
FUNCTION(full_like, at::full_like(*self, *fill_value), Tensor* self, Scalar* fill_value)
FUNCTION(full, at::full(list(size_data, size_len), *fill_value, options(kind, device)),
    const int64_t* size_data, int size_len, Scalar* fill_value, int kind, int device)
FUNCTION(zeros, at::zeros(list(size_data, size_len), options(kind, device)),
    const int64_t* size_data, int size_len, int kind, int device)
FUNCTION(zeros_like, at::zeros_like(*self), Tensor* self)

// ---- Views and copies. ----

FUNCTION(expand, self->expand(list(size_data, size_len), implicit != 0),
    Tensor* self, const int64_t* size_data, int size_len, int implicit)
void atg_as_strided(Tensor** out, Tensor* self, const int64_t* size_data, int size_len, const int64_t* stride_data, int stride_len,
                    int64_t storage_offset, int8_t storage_offset_null) {
    const auto offset = storage_offset_null ? std::nullopt : std::optional(storage_offset);
    give(out, [&] { return self->as_strided(list(size_data, size_len), list(stride_data, stride_len), offset); });
}
FUNCTION(cat, at::cat(all_of(tensors_data, tensors_len), dim), Tensor* const* tensors_data, int tensors_len, int64_t dim)
FUNCTION(gather, self->gather(dim, *index, sparse_grad != 0), Tensor* self, int64_t dim, Tensor* index, int sparse_grad)
FUNCTION(index, self->index(optional_tensors(indices_data, indices_len)),
    Tensor* self, Tensor* const* indices_data, int indices_len)
FUNCTION(index_select, self->index_select(dim, *index), Tensor* self, int64_t dim, Tensor* index)
FUNCTION(narrow, self->narrow(dim, start, length), Tensor* self, int64_t dim, int64_t start, int64_t length)
FUNCTION(select, self->select(dim, index), Tensor* self, int64_t dim, int64_t index)
FUNCTIONS(sort, self->sort(dim, descending != 0), Tensor* self, int64_t dim, int descending)
FUNCTION(stack, at::stack(all_of(tensors_data, tensors_len), dim), Tensor* const* tensors_data, int tensors_len, int64_t dim)
FUNCTION(to, self->to(device_of(device)), Tensor* self, int device)
FUNCTION(totype, self->toType(kind_of(scalar_type)), Tensor* self, int scalar_type)
FUNCTION(transpose, self->transpose(dim0, dim1), Tensor* self, int64_t dim0, int64_t dim1)
FUNCTION(unflatten, self->unflatten(dim, list(sizes_data, sizes_len)),
    Tensor* self, int64_t dim, const int64_t* sizes_data, int sizes_len)
FUNCTION(view_dtype, self->view(kind_of(dtype)), Tensor* self, int dtype)
FUNCTION(index_put_, self->index_put_(optional_tensors(indices_data, indices_len), *values, accumulate != 0),
    Tensor* self, Tensor* const* indices_data, int indices_len, Tensor* values, int accumulate)

// ---- Elementwise. ----

FUNCTION(bucketize, at::bucketize(*self, *boundaries, out_int32 != 0, right != 0),
    Tensor* self, Tensor* boundaries, int out_int32, int right)
FUNCTION(clamp, self->clamp(*min, *max), Tensor* self, Scalar* min, Scalar* max)
FUNCTIONS(frexp, self->frexp(), Tensor* self)
FUNCTION(masked_fill, self->masked_fill(*mask, *value), Tensor* self, Tensor* mask, Scalar* value)
FUNCTION(masked_fill_, self->masked_fill_(*mask, *value), Tensor* self, Tensor* mask, Scalar* value)
FUNCTION(mul_out, at::mul_out(*result, *self, *other), Tensor* result, Tensor* self, Tensor* other)
FUNCTION(nan_to_num_, self->nan_to_num_(number(nan, nan_null), number(posinf, posinf_null), number(neginf, neginf_null)),
    Tensor* self, double nan, int8_t nan_null, double posinf, int8_t posinf_null, double neginf, int8_t neginf_null)
FUNCTION(threshold, at::threshold(*self, *threshold, *value), Tensor* self, Scalar* threshold, Scalar* value)
FUNCTION(where_self, at::where(*condition, *self, *other), Tensor* condition, Tensor* self, Tensor* other)

// ---- Comparisons and logic. ----

FUNCTION(argmin, self->argmin(dim_null ? std::nullopt : std::optional(dim_v), keepdim != 0),
    Tensor* self, int64_t dim_v, int8_t dim_null, int keepdim)
FUNCTION(isclose, self->isclose(*other, rtol, atol, equal_nan != 0),
    Tensor* self, Tensor* other, double rtol, double atol, int equal_nan)

// ---- Reductions and products. ----

FUNCTION(baddbmm_, self->baddbmm_(*batch1, *batch2), Tensor* self, Tensor* batch1, Tensor* batch2)
FUNCTION(bmm, at::bmm(*self, *mat2), Tensor* self, Tensor* mat2)
FUNCTION(bmm_out, at::bmm_out(*result, *self, *mat2), Tensor* result, Tensor* self, Tensor* mat2)
FUNCTION(count_nonzero, self->count_nonzero(dim_null ? std::nullopt : std::optional(dim_v)),
    Tensor* self, int64_t dim_v, int8_t dim_null)
FUNCTION(_softmax_out, at::_softmax_out(*result, *self, dim, half_to_float != 0),
    Tensor* result, Tensor* self, int64_t dim, int half_to_float)
FUNCTION(sum_dim_intlist, self->sum(optional_list(dim_data, dim_len), keepdim != 0, optional_kind(dtype)),
    Tensor* self, const int64_t* dim_data, int dim_len, int keepdim, int dtype)
FUNCTION(cumsum, self->cumsum(dim, optional_kind(dtype)), Tensor* self, int64_t dim, int dtype)

// ---- Attention. ----

void atg__scaled_dot_product_flash_attention_for_cpu(Tensor** out, Tensor* query, Tensor* key, Tensor* value, double dropout_p,
                                                     int is_causal, Tensor* attn_mask, double scale, int8_t scale_null) {
    give_all(out, [&] {
        return at::_scaled_dot_product_flash_attention_for_cpu(*query, *key, *value, dropout_p, is_causal != 0,
                                                               optional_tensor(attn_mask), number(scale, scale_null));
    });
}
void atg__scaled_dot_product_flash_attention_for_cpu_backward(Tensor** out, Tensor* grad_out, Tensor* query, Tensor* key,
                                                              Tensor* value, Tensor* forward_out, Tensor* logsumexp,
                                                              double dropout_p, int is_causal, Tensor* attn_mask, double scale,
                                                              int8_t scale_null) {
    give_all(out, [&] {
        return at::_scaled_dot_product_flash_attention_for_cpu_backward(*grad_out, *query, *key, *value, *forward_out, *logsumexp,
                                                                        dropout_p, is_causal != 0, optional_tensor(attn_mask),
                                                                        number(scale, scale_null));
    });
}

// ---- Methods with one further argument or none. The macro's name says which: UNARY none, BINARY a tensor, SCALAR a number,
// INTEGER an integer, LIST integers, REDUCTION dimensions. A row names ATen's method, after tch's function where that differs. ----

#define METHOD(function, call, ...) FUNCTION(function, self->call, __VA_ARGS__)
#define UNARY(name) METHOD(name, name(), Tensor* self)
#define BINARY(function, name) METHOD(function, name(*other), Tensor* self, Tensor* other)
#define SCALAR(function, name) METHOD(function, name(*other), Tensor* self, Scalar* other)
#define INTEGER(function, name) METHOD(function, name(n), Tensor* self, int64_t n)
#define LIST(name) METHOD(name, name(list(data, length)), Tensor* self, const int64_t* data, int length)
#define REDUCTION(name) \
    METHOD(name, name(list(data, length), keepdim != 0), Tensor* self, const int64_t* data, int length, int keepdim)

UNARY(abs) UNARY(abs_) UNARY(any) UNARY(contiguous) UNARY(exp) UNARY(exp_) UNARY(log_) UNARY(logical_not) UNARY(neg) UNARY(neg_)
UNARY(round) UNARY(sigmoid) UNARY(square_) UNARY(tanh_) UNARY(zero_)
BINARY(add, add) BINARY(add_, add_) BINARY(bitwise_right_shift, bitwise_right_shift) BINARY(div, div) BINARY(eq_tensor, eq)
BINARY(ge_tensor, ge) BINARY(le_tensor, le) BINARY(logaddexp, logaddexp) BINARY(logical_and, logical_and)
BINARY(logical_or, logical_or) BINARY(lt_tensor, lt) BINARY(maximum, maximum) BINARY(mul, mul) BINARY(mul_, mul_)
BINARY(sub, sub) BINARY(sub_, sub_)
SCALAR(add_scalar, add) SCALAR(add_scalar_, add_) SCALAR(bitwise_and, bitwise_and)
SCALAR(bitwise_right_shift_tensor_scalar, bitwise_right_shift) SCALAR(clamp_max, clamp_max) SCALAR(clamp_min, clamp_min)
SCALAR(div_scalar_, div_) SCALAR(eq, eq) SCALAR(fill_, fill_) SCALAR(floor_divide_scalar, floor_divide) SCALAR(ge, ge)
SCALAR(le, le) SCALAR(lt, lt) SCALAR(mul_scalar, mul) SCALAR(mul_scalar_, mul_) SCALAR(remainder, remainder)
INTEGER(squeeze_dim, squeeze) INTEGER(tril, tril) INTEGER(triu, triu) INTEGER(unsqueeze, unsqueeze)
LIST(permute) LIST(reshape) LIST(sum_to_size) LIST(view)
REDUCTION(amax) REDUCTION(amin)

// tools/build_shims.py compiles several files as one unit, and others may use these names
#undef FUNCTION
#undef FUNCTIONS
#undef METHOD
#undef UNARY
#undef BINARY
#undef SCALAR
#undef INTEGER
#undef LIST
#undef REDUCTION

}  // extern "C"
// clang-format on
