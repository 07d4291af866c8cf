// Registers both overloads of volta_fa::fwd_kvcache. The default overload only reads the caches; .append first writes k and v into
// them. Its schema declares the writes, so functionalization and torch.compile keep the order of other reads.

#include "ops.h"
#include "registration.h"
#include "rust.h"

#include <ATen/DeviceGuard.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

namespace volta_fa {
namespace {

using Result = std::tuple<Tensor, Tensor>;  // out, softmax_lse

// Tensors of a call; k and v are undefined without an append.
struct Operands {
    const Tensor &q, &k_cache, &v_cache;
    Tensor k, v;
};

Result run(const Operands& t, VOLTA_FA_KVCACHE_OPTION_PARAMETERS(int64_t)) {
    const c10::OptionalDeviceGuard guard(at::device_of(t.q));
    const KvCacheArgs args{handle(t.q),        handle(t.k_cache), handle(t.v_cache),
                           handle(t.k),        handle(t.v),       kvcache_option_args<int64_t>(VOLTA_FA_KVCACHE_OPTION_ARGUMENTS),
                           current_stream(t.q)};
    std::array<void*, 2> outputs{};
    check(volta_fa_fwd_kvcache(&args, outputs.data()));
    return {take_tensor(outputs[0]), take_tensor(outputs[1])};
}

Result shapes(const Operands& t, VOLTA_FA_KVCACHE_OPTION_PARAMETERS(c10::SymInt)) {
    const KvCacheArgs args{handle(t.q),       handle(t.k_cache),
                           handle(t.v_cache), handle(t.k),
                           handle(t.v),       kvcache_option_args<c10::SymInt>(VOLTA_FA_KVCACHE_OPTION_ARGUMENTS),
                           /*stream=*/nullptr};
    int64_t columns = 1;  // of an element: int4 has two in a byte
    check(volta_fa_check_fwd_kvcache(&args, &columns));
    c10::SymDimVector out(t.q.sym_sizes().begin(), t.q.sym_sizes().end());
    out.back() = t.v_cache.sym_sizes().back();
    if (columns > 1) out.back() = out.back() * columns;
    const auto nheads = t.q.sym_size(-2), rows = t.q.sym_size(-3);
    const auto lse = t.q.dim() == 3 ? c10::SymDimVector{nheads, rows} : c10::SymDimVector{t.q.sym_size(0), nheads, rows};
    return {at::empty_symint(out, t.q.options()), at::empty_symint(lse, t.q.options().dtype(at::kFloat))};
}

using ReadOp = Result(const Tensor&, const Tensor&, const Tensor&, VOLTA_FA_KVCACHE_OPTION_PARAMETERS(c10::SymInt));
using AppendOp = Result(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        VOLTA_FA_KVCACHE_OPTION_PARAMETERS(c10::SymInt));

Result read(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, VOLTA_FA_KVCACHE_OPTION_PARAMETERS(int64_t)) {
    return run({q, k_cache, v_cache, {}, {}}, VOLTA_FA_KVCACHE_OPTION_ARGUMENTS);
}

Result append(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v,
              VOLTA_FA_KVCACHE_OPTION_PARAMETERS(int64_t)) {
    return run({q, k_cache, v_cache, k, v}, VOLTA_FA_KVCACHE_OPTION_ARGUMENTS);
}

Result read_meta(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, VOLTA_FA_KVCACHE_OPTION_PARAMETERS(c10::SymInt)) {
    return shapes({q, k_cache, v_cache, {}, {}}, VOLTA_FA_KVCACHE_OPTION_ARGUMENTS);
}

Result append_meta(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v,
                   VOLTA_FA_KVCACHE_OPTION_PARAMETERS(c10::SymInt)) {
    return shapes({q, k_cache, v_cache, k, v}, VOLTA_FA_KVCACHE_OPTION_ARGUMENTS);
}

const c10::TypedOperatorHandle<ReadOp>& read_op() {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::fwd_kvcache", "").typed<ReadOp>();
    return op;
}

const c10::TypedOperatorHandle<AppendOp>& append_op() {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::fwd_kvcache", "append").typed<AppendOp>();
    return op;
}

// Autograd: the backward pass raises an error. PyTorch's own fallback does the same, but it reads the schema in each call. That
// takes an eighth of a decode step's host time.
constexpr char kNoGradient[] = "volta_fa::fwd_kvcache: the derivative is not implemented: a cache is for inference";

struct NoGradient : torch::autograd::Function<NoGradient> {
    template <class... Inputs>
    static torch::autograd::variable_list forward(torch::autograd::AutogradContext*, const Result& found, const Inputs&...) {
        return {std::get<0>(found), std::get<1>(found)};
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, const torch::autograd::variable_list&) {
        C10_THROW_ERROR(NotImplementedError, kNoGradient);
    }
};

template <class Other>
bool requires_gradient(const Other&) {
    return false;
}
bool requires_gradient(const Tensor& t) {
    if (!t.defined()) return false;
    TORCH_CHECK_NOT_IMPLEMENTED(!t._fw_grad(/*level=*/0).defined(), kNoGradient);
    return t.requires_grad();
}
bool requires_gradient(const OptionalTensor& t) { return t && requires_gradient(*t); }

template <class Op, class... Inputs>
Result without_gradient(const Op& op, c10::DispatchKeySet keys, const Inputs&... inputs) {
    const auto call = [&] {
        const at::AutoDispatchBelowAutograd guard;
        return op.redispatch(keys & c10::after_autograd_keyset, inputs...);
    };
    const bool requires_grad = (requires_gradient(inputs) | ...);
    if (!requires_grad || !at::GradMode::is_enabled()) return call();
    const auto outputs = NoGradient::apply(call(), inputs...);
    return {outputs[0], outputs[1]};
}

Result read_autograd(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                     VOLTA_FA_KVCACHE_OPTION_PARAMETERS(c10::SymInt)) {
    return without_gradient(read_op(), keys, q, k_cache, v_cache, VOLTA_FA_KVCACHE_OPTION_ARGUMENTS);
}

Result append_autograd(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                       const Tensor& v, VOLTA_FA_KVCACHE_OPTION_PARAMETERS(c10::SymInt)) {
    TORCH_CHECK(!at::GradMode::is_enabled() || !(k_cache.requires_grad() || v_cache.requires_grad()),
                "volta_fa::fwd_kvcache: k_cache and v_cache are written in place: got one that requires a gradient");
    return without_gradient(append_op(), keys, q, k_cache, v_cache, k, v, VOLTA_FA_KVCACHE_OPTION_ARGUMENTS);
}

template <c10::DeviceType device>
Result read_autocast(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                     VOLTA_FA_KVCACHE_OPTION_PARAMETERS(c10::SymInt)) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return read_op().call(cast_to_cache_dtype(k_cache, q, device), k_cache, v_cache, VOLTA_FA_KVCACHE_OPTION_ARGUMENTS);
}

template <c10::DeviceType device>
Result append_autocast(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v,
                       VOLTA_FA_KVCACHE_OPTION_PARAMETERS(c10::SymInt)) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return append_op().call(cast_to_cache_dtype(k_cache, q, device), k_cache, v_cache, cast_to_cache_dtype(k_cache, k, device),
                            cast_to_cache_dtype(k_cache, v, device), VOLTA_FA_KVCACHE_OPTION_ARGUMENTS);
}

}  // namespace

VOLTA_FA_LIBRARY_FRAGMENT(m) {
    m.def("fwd_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, *, " VOLTA_FA_KVCACHE_OPTION_SCHEMA
          ") -> (Tensor out, Tensor softmax_lse)",
          {at::Tag::pt2_compliant_tag});
    m.def(
        "fwd_kvcache.append(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
        "*, " VOLTA_FA_KVCACHE_OPTION_WRITING_SCHEMA ") -> (Tensor out, Tensor softmax_lse)",
        {at::Tag::pt2_compliant_tag});
}

#define VOLTA_FA_KVCACHE_IMPL(key, read, append) \
    VOLTA_FA_LIBRARY_IMPL(key, m) {              \
        m.impl("fwd_kvcache", read);             \
        m.impl("fwd_kvcache.append", append);    \
    }
VOLTA_FA_KVCACHE_IMPL(CPU, read, append)
VOLTA_FA_KVCACHE_IMPL(CUDA, read, append)
VOLTA_FA_KVCACHE_IMPL(Meta, read_meta, append_meta)
VOLTA_FA_KVCACHE_IMPL(AutocastCPU, read_autocast<c10::DeviceType::CPU>, append_autocast<c10::DeviceType::CPU>)
VOLTA_FA_KVCACHE_IMPL(AutocastCUDA, read_autocast<c10::DeviceType::CUDA>, append_autocast<c10::DeviceType::CUDA>)
VOLTA_FA_KVCACHE_IMPL(Autograd, read_autograd, append_autograd)

}  // namespace volta_fa
