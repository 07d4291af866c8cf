// Registers volta_fa::fwd_fast.

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

using Result = std::tuple<Tensor, Tensor>;  // out, softmax_lse
using Op = Result(const Tensor&, const Tensor&, const Tensor&, VOLTA_FA_FAST_OPTION_PARAMETERS(c10::SymInt));

const c10::TypedOperatorHandle<Op>& op() {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::fwd_fast", "").typed<Op>();
    return op;
}

Result run(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_FAST_OPTION_PARAMETERS(int64_t)) {
    const c10::OptionalDeviceGuard guard(at::device_of(q));
    const FastArgs args{handle(q), handle(k), handle(v), fast_option_args<int64_t>(VOLTA_FA_FAST_OPTION_ARGUMENTS),
                        current_stream(q)};
    std::array<void*, 2> outputs{};
    check(volta_fa_fwd_fast(&args, outputs.data()));
    return {take_tensor(outputs[0]), take_tensor(outputs[1])};
}

Result meta(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_FAST_OPTION_PARAMETERS(c10::SymInt)) {
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
Result autocast(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_FAST_OPTION_PARAMETERS(c10::SymInt)) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const auto dtype = at::autocast::get_autocast_dtype(device);
    const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(dtype, t, device); };
    return op().call(cast(q), cast(k), cast(v), VOLTA_FA_FAST_OPTION_ARGUMENTS);
}

// There is no derivative: quantization has none that training could use.
Result autograd(const Tensor& q, const Tensor& k, const Tensor& v, VOLTA_FA_FAST_OPTION_PARAMETERS(c10::SymInt)) {
    const auto check_no_gradient = [](const char* name, const Tensor& t) {
        TORCH_CHECK_NOT_IMPLEMENTED(!t.defined() || !t.requires_grad() || !at::GradMode::is_enabled(), "volta_fa::fwd_fast: ", name,
                                    ": got a tensor that requires grad, expected none: there is no derivative. "
                                    "Use torch.no_grad() or volta_fa::fwd");
        TORCH_CHECK_NOT_IMPLEMENTED(!t.defined() || !t._fw_grad(/*level=*/0).defined(), "volta_fa::fwd_fast: ", name,
                                    ": got a tensor with a tangent, expected none: there is no derivative. Use volta_fa::fwd");
    };
    check_no_gradient("q", q);
    check_no_gradient("k", k);
    check_no_gradient("v", v);
    at::AutoDispatchBelowADInplaceOrView guard;
    return op().call(q, k, v, VOLTA_FA_FAST_OPTION_ARGUMENTS);
}

}  // namespace

VOLTA_FA_LIBRARY_FRAGMENT(m) {
    m.def("fwd_fast(Tensor q, Tensor k, Tensor v, *, " VOLTA_FA_FAST_OPTION_SCHEMA ") -> (Tensor out, Tensor softmax_lse)",
          {at::Tag::pt2_compliant_tag});
}

VOLTA_FA_LIBRARY_IMPL(CPU, m) { m.impl("fwd_fast", run); }
VOLTA_FA_LIBRARY_IMPL(CUDA, m) { m.impl("fwd_fast", run); }
VOLTA_FA_LIBRARY_IMPL(Meta, m) { m.impl("fwd_fast", meta); }
VOLTA_FA_LIBRARY_IMPL(AutocastCPU, m) { m.impl("fwd_fast", autocast<c10::DeviceType::CPU>); }
VOLTA_FA_LIBRARY_IMPL(AutocastCUDA, m) { m.impl("fwd_fast", autocast<c10::DeviceType::CUDA>); }
VOLTA_FA_LIBRARY_IMPL(Autograd, m) { m.impl("fwd_fast", autograd); }

}  // namespace volta_fa
