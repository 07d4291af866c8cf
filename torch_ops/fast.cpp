// Registers volta_fa::fwd_fast and volta_fa::prepare_fast.

#include "ops.h"
#include "registration.h"
#include "rust.h"

#include <ATen/DeviceGuard.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace volta_fa {
namespace {

FastResult run(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_FAST_OPTION_PARAMETERS(int64_t)) {
    const c10::OptionalDeviceGuard guard(at::device_of(q));
    const FastArgs args{handle(q), handle(k), handle(v), fast_option_args<int64_t>(VOLTA_FA_FAST_OPTION_ARGUMENTS),
                        current_stream(q)};
    std::array<void*, 2> outputs{};
    check(volta_fa_fwd_fast(&args, outputs.data()));
    return {take_tensor(outputs[0]), take_tensor(outputs[1])};
}

FastResult meta(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_FAST_OPTION_PARAMETERS(c10::SymInt)) {
    const FastArgs args{handle(q), handle(k), handle(v), fast_option_args<c10::SymInt>(VOLTA_FA_FAST_OPTION_ARGUMENTS),
                        /*stream=*/nullptr};
    check(volta_fa_check_fwd_fast(&args));
    c10::SymDimVector out(q.sym_sizes().begin(), q.sym_sizes().end());
    out.back() = v.sym_sizes().back();
    const auto nheads = q.sym_size(-2), rows = q.sym_size(-3);
    const auto lse = q.dim() == 3 ? c10::SymDimVector{nheads, rows} : c10::SymDimVector{q.sym_size(0), nheads, rows};
    return {at::empty_symint(out, q.options()), at::empty_symint(lse, q.options().dtype(at::kFloat))};
}

template <c10::DeviceType device>
FastResult autocast(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_FAST_OPTION_PARAMETERS(c10::SymInt)) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const auto dtype = at::autocast::get_autocast_dtype(device);
    const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(dtype, t, device); };
    return fast_op().call(cast(q), cast(k), cast(v), VOLTA_FA_FAST_OPTION_ARGUMENTS);
}

void check_no_gradient(const char* op, const char* name, const Tensor& t) {
    TORCH_CHECK_NOT_IMPLEMENTED(!t.defined() || !t.requires_grad() || !at::GradMode::is_enabled(), "volta_fa::", op, ": ", name,
                                ": got a tensor that requires grad, expected none: there is no derivative. "
                                "Use torch.no_grad() or volta_fa::fwd");
    TORCH_CHECK_NOT_IMPLEMENTED(!t.defined() || !t._fw_grad(/*level=*/0).defined(), "volta_fa::", op, ": ", name,
                                ": got a tensor with a tangent, expected none: there is no derivative. Use volta_fa::fwd");
}

// There is no derivative: quantization has none that training could use.
FastResult autograd(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_FAST_OPTION_PARAMETERS(c10::SymInt)) {
    check_no_gradient("fwd_fast", "q", q);
    check_no_gradient("fwd_fast", "k", k);
    check_no_gradient("fwd_fast", "v", v);
    at::AutoDispatchBelowADInplaceOrView guard;
    return fast_op().call(q, k, v, VOLTA_FA_FAST_OPTION_ARGUMENTS);
}

// ---- prepare_fast ----------------------------------------------------------------------------------------------------

using PrepareOp = Tensor(const Tensor&, const Tensor&, VOLTA_FA_PREPARE_OPTION_PARAMETERS(c10::SymInt));

const c10::TypedOperatorHandle<PrepareOp>& prepare_op() {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::prepare_fast", "").typed<PrepareOp>();
    return op;
}

Tensor prepare(const Tensor& k, const Tensor& v, VOLTA_FA_PREPARE_OPTION_PARAMETERS(int64_t)) {
    const c10::OptionalDeviceGuard guard(at::device_of(k));
    const PrepareArgs args{handle(k), handle(v), prepare_option_args<int64_t>(VOLTA_FA_PREPARE_OPTION_ARGUMENTS),
                           current_stream(k)};
    void* output = nullptr;
    check(volta_fa_prepare_fast(&args, &output));
    return take_tensor(output);
}

// The sizes are those of CodeSizes::prepared (src/ops/codes.rs).
Tensor prepare_meta(const Tensor& k, const Tensor& v, VOLTA_FA_PREPARE_OPTION_PARAMETERS(c10::SymInt)) {
    const PrepareArgs args{handle(k), handle(v), prepare_option_args<c10::SymInt>(VOLTA_FA_PREPARE_OPTION_ARGUMENTS),
                           /*stream=*/nullptr};
    check(volta_fa_check_prepare_fast(&args));
    const bool packed = k.dim() == 3;
    const auto rows = k.sym_size(-3), heads = k.sym_size(-2);
    const auto columns = k.sym_size(-1).max(v.sym_size(-1));
    const int64_t headdim = columns <= 64 ? 64 : columns <= 128 ? 128 : 256;
    const auto batch = packed ? cu_seqlens_k->sym_size(0) - 1 : k.sym_size(0);
    const auto seqlen = packed ? rows.min(*max_seqlen_k) : rows;
    const auto blocks = packed ? rows / 64 + batch + 1 : batch * ((seqlen + 63) / 64);
    auto bytes = heads * (blocks * (64 * headdim + 16) + batch * (4 * headdim + (seqlen + 255) / 256 * 16));
    if (k.scalar_type() == at::kBFloat16) bytes = bytes + (packed ? rows : batch * rows) * heads * ((v.sym_size(-1) + 7) / 8 * 16);
    return at::empty_symint({bytes + (rotate ? 16 : 0)}, k.options().dtype(at::kByte));
}

template <c10::DeviceType device>
Tensor prepare_autocast(const Tensor& k, const Tensor& v, VOLTA_FA_PREPARE_OPTION_PARAMETERS(c10::SymInt)) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const auto dtype = at::autocast::get_autocast_dtype(device);
    const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(dtype, t, device); };
    return prepare_op().call(cast(k), cast(v), VOLTA_FA_PREPARE_OPTION_ARGUMENTS);
}

Tensor prepare_autograd(const Tensor& k, const Tensor& v, VOLTA_FA_PREPARE_OPTION_PARAMETERS(c10::SymInt)) {
    check_no_gradient("prepare_fast", "k", k);
    check_no_gradient("prepare_fast", "v", v);
    at::AutoDispatchBelowADInplaceOrView guard;
    return prepare_op().call(k, v, VOLTA_FA_PREPARE_OPTION_ARGUMENTS);
}

}  // namespace

VOLTA_FA_LIBRARY_FRAGMENT(m) {
    m.def("fwd_fast(Tensor q, Tensor k, Tensor v, *, " VOLTA_FA_FAST_OPTION_SCHEMA ") -> (Tensor out, Tensor softmax_lse)",
          {at::Tag::pt2_compliant_tag});
    m.def("prepare_fast(Tensor k, Tensor v, *, " VOLTA_FA_PREPARE_OPTION_SCHEMA ") -> Tensor", {at::Tag::pt2_compliant_tag});
}

VOLTA_FA_LIBRARY_IMPL(CPU, m) {
    m.impl("fwd_fast", run);
    m.impl("prepare_fast", prepare);
}
VOLTA_FA_LIBRARY_IMPL(CUDA, m) {
    m.impl("fwd_fast", run);
    m.impl("prepare_fast", prepare);
}
VOLTA_FA_LIBRARY_IMPL(Meta, m) {
    m.impl("fwd_fast", meta);
    m.impl("prepare_fast", prepare_meta);
}
VOLTA_FA_LIBRARY_IMPL(AutocastCPU, m) {
    m.impl("fwd_fast", autocast<c10::DeviceType::CPU>);
    m.impl("prepare_fast", prepare_autocast<c10::DeviceType::CPU>);
}
VOLTA_FA_LIBRARY_IMPL(AutocastCUDA, m) {
    m.impl("fwd_fast", autocast<c10::DeviceType::CUDA>);
    m.impl("prepare_fast", prepare_autocast<c10::DeviceType::CUDA>);
}
VOLTA_FA_LIBRARY_IMPL(Autograd, m) {
    m.impl("fwd_fast", autograd);
    m.impl("prepare_fast", prepare_autograd);
}

}  // namespace volta_fa
