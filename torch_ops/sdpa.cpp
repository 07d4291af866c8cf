// PyTorch's own scaled_dot_product_attention, run by volta_fa where it can.
//
// aten::scaled_dot_product_attention is a composite op: it chooses an implementation and calls that. This file replaces
// its composite kernel by one that calls volta_fa::fwd, or PyTorch's own if volta_fa is off or cannot serve the call.
// Overriding the composite instead of the fused ops avoids imitating their auxiliary outputs, allows grouped heads and
// headdims up to 256, and shows volta_fa::fwd in torch.compile's graphs.
//
// The replacement is registered at CompositeImplicitAutograd, like the original. With a kernel at a backend or autograd
// key, torch.export would no longer decompose the op. torch.compile would miss a kernel registered after its first
// trace, because it caches the key to which a call resolved.
//
// It is registered when the library is loaded, and stays: dispatch tables may not change while other threads call the
// op. A few atomics switch it on and off.

#include "ops.h"
#include "rust.h"
#include "subclass.h"

#include <ATen/Context.h>
#include <ATen/core/Dict.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <string>

namespace volta_fa {
namespace {

// ---- enabled devices -------------------------------------------------------------------------------------------------

constexpr const char* variable = "VOLTA_FA_ENABLE_SDPA";
constexpr int64_t max_devices = 64;

std::atomic<bool> cpu_enabled{false};
// a bit for each CUDA device
std::atomic<uint64_t> cuda_enabled{0};
std::atomic<uint64_t> cuda_undecided{0};  // decided by their first call: loading may not initialize CUDA

std::mutex configuring;         // guards all writes to this state
bool newer_devices_too{false};  // "force": undecided devices may be newer than Turing
uint64_t warned_of{0};          // a bit for each device that caused a warning

// Enables or disables an undecided device. The environment variable is read before devices are known, so the first call decides.
void decide(int64_t device) {
    std::string refused;
    {
        const std::lock_guard<std::mutex> lock(configuring);
        const uint64_t bit = uint64_t{1} << device;
        if (!(cuda_undecided & bit)) return;
        int32_t sm = 0;
        const Status status = volta_fa_device_sm(device, &sm);
        if (status.code == 0 && volta_fa_serves_sm(sm, newer_devices_too)) {
            cuda_enabled |= bit;
        } else {
            std::string reason = status.code != 0 ? take_string(status.message) : "it is of sm_" + std::to_string(sm);
            if (!(warned_of & bit)) refused = std::move(reason);
            warned_of |= bit;
        }
        cuda_undecided &= ~bit;
    }
    if (!refused.empty()) TORCH_WARN(variable, ": cuda:", device, " keeps PyTorch's attention: ", refused);
}

bool enabled_on(const at::Device& device) {
    if (device.is_cpu()) return cpu_enabled;
    if (!device.is_cuda() || device.index() < 0 || device.index() >= max_devices) return false;
    const uint64_t bit = uint64_t{1} << device.index();
    if (cuda_undecided & bit) decide(device.index());
    return cuda_enabled & bit;
}

// on_first_use: "1" or "force", for all CUDA devices beside the named ones; or "".
void configure(bool cpu, at::IntArrayRef cuda_devices, std::string_view on_first_use) {
    uint64_t cuda = 0;
    for (const auto device : cuda_devices) {
        TORCH_CHECK_VALUE(device >= 0 && device < max_devices, "volta_fa: sdpa: got CUDA device ", device,
                          ", expected one from 0 to ", max_devices - 1);
        cuda |= uint64_t{1} << device;
    }
    const std::lock_guard<std::mutex> lock(configuring);
    cpu_enabled = cpu;
    cuda_enabled = cuda;
    cuda_undecided = on_first_use.empty() ? 0 : ~cuda;
    newer_devices_too = on_first_use == "force";
}

// What VOLTA_FA_ENABLE_SDPA said when the library was loaded, as arguments of configure().
std::tuple<bool, std::string> from_environment() {
    static const auto found = [] {
        const char* text = std::getenv(variable);
        const std::string value = text ? text : "";
        const bool known = value.empty() || value == "0" || value == "cpu" || value == "1" || value == "force";
        if (!known) TORCH_WARN(variable, ": got '", value, "', expected 1, force, cpu or 0: nothing is enabled");
        return std::make_tuple(value == "cpu", value == "1" || value == "force" ? value : "");
    }();
    return found;
}

// ---- counters --------------------------------------------------------------------------------------------------------

enum class Decision : size_t {
    ran,
    traced,
    // the rest are reasons to fall back
    attn_mask,
    dropout,
    dtype,
    forward_mode,
    functorch,
    headdim,
    layout,
    scale,
    sdpa_kernel,
    shape,
    subclass,
    count
};

// Names as sdpa_stats() shows them; docs/guides/sdpa.md explains each.
constexpr std::array<const char*, static_cast<size_t>(Decision::count)> decision_names = {
    "ran",     "traced", "attn_mask", "dropout",     "dtype", "forward_mode", "functorch",
    "headdim", "layout", "scale",     "sdpa_kernel", "shape", "subclass"};

std::array<std::atomic<int64_t>, decision_names.size()> decisions{};

void count(Decision decision) { decisions[static_cast<size_t>(decision)].fetch_add(1, std::memory_order_relaxed); }

// ---- the decision ----------------------------------------------------------------------------------------------------

struct Call {
    const Tensor &q, &k, &v;
    const OptionalTensor& attn_mask;
    double dropout_p;
    bool is_causal;
    std::optional<double> scale;
    bool enable_gqa;

    bool has_mask() const { return attn_mask && attn_mask->defined(); }

    template <typename Predicate>
    bool any(Predicate predicate) const {
        return predicate(q) || predicate(k) || predicate(v) || (has_mask() && predicate(*attn_mask));
    }
};

// Returns whether a graph is being recorded, or only shapes computed. These modes have their own slots, apart from users'
// modes (FlopCounterMode, selective checkpointing), under which a call is eager.
bool traced() {
    using c10::impl::TorchDispatchModeKey;
    using c10::impl::TorchDispatchModeTLS;
    return TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE) ||
           TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY) ||
           TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL);
}

// Returns whether any fused backend that volta_fa replaces is enabled (sdpa_kernel). The CPU has only flash.
bool fused_allowed(const Call& c) {
    const auto& context = at::globalContext();
    return context.userEnabledFlashSDP() || (c.q.is_cuda() && context.userEnabledMemEfficientSDP());
}

constexpr int64_t max_headdim = 256;

bool dtype_supported(const Call& c) {
    const auto dtype = c.q.scalar_type();
    if (c.k.scalar_type() != dtype || c.v.scalar_type() != dtype) return false;
    if (dtype == at::kHalf || dtype == at::kBFloat16) return true;
    return c.q.is_cpu() && (dtype == at::kFloat || dtype == at::kDouble);
}

// Expects (batch, heads, seqlen, headdim), matching batches and heads, and no broadcast.
bool shape_supported(const Call& c) {
    if (c.q.dim() != 4 || c.k.dim() != 4 || c.v.dim() != 4) return false;
    const auto &q = c.q.sym_sizes(), &k = c.k.sym_sizes(), &v = c.v.sym_sizes();
    if (q[0] != k[0] || k[0] != v[0] || k[1] != v[1] || k[2] != v[2] || q[3] != k[3]) return false;
    return c.enable_gqa ? k[1] > 0 && q[1] % k[1] == 0 : q[1] == k[1];
}

// Expects a mask that PyTorch takes: bool, fp32 or q's dtype, rank 2 to 4, broadcast to (batch, heads, seqlen_q,
// seqlen_k), and no causal mask beside it.
bool mask_supported(const Call& c) {
    if (!c.has_mask()) return true;
    const Tensor& mask = *c.attn_mask;
    const auto dtype = mask.scalar_type();
    if (dtype != at::kBool && dtype != at::kFloat && dtype != c.q.scalar_type()) return false;
    if (c.is_causal || mask.dim() < 2 || mask.dim() > 4) return false;
    const std::array<c10::SymInt, 4> full = {c.q.sym_size(0), c.q.sym_size(1), c.q.sym_size(2), c.k.sym_size(2)};
    for (int64_t i = 1; i <= mask.dim(); ++i) {
        const auto size = mask.sym_size(-i);
        if (size != 1 && size != full[4 - i]) return false;
    }
    return true;
}

bool headdim_supported(const Tensor& t) { return t.sym_size(3) >= 1 && t.sym_size(3) <= max_headdim; }

// Returns why PyTorch's implementation must run; nothing if volta_fa can. Wrong arguments (a mask of another dtype, tensors of
// several devices) count as a reason too: PyTorch then raises the error its users know.
std::optional<Decision> reason_to_fall_back(const Call& c) {
    if (!fused_allowed(c)) return Decision::sdpa_kernel;
    // nested and sparse tensors
    if (c.any([](const Tensor& t) { return t.is_nested() || t.layout() != at::kStrided; })) return Decision::layout;
    if (c.scale && !std::isfinite(*c.scale)) return Decision::scale;
    if (!(c.dropout_p >= 0.0 && c.dropout_p < 1.0)) return Decision::dropout;
    if (!dtype_supported(c)) return Decision::dtype;
    constexpr c10::DispatchKeySet functorch{c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper};
    if (c.any([&](const Tensor& t) { return t.key_set().has_any(functorch); })) return Decision::functorch;
    // A subclass other than DTensor implements PyTorch's ops and not volta_fa's. A tracer has its own subclasses, which look
    // like any other.
    if (!traced() && c.any([](const Tensor& t) { return is_subclass(t) && !has_rules(t); })) return Decision::subclass;
    if (!shape_supported(c) || c.any([&](const Tensor& t) { return t.device() != c.q.device(); })) return Decision::shape;
    if (!mask_supported(c)) return Decision::attn_mask;
    if (!headdim_supported(c.q) || !headdim_supported(c.v)) return Decision::headdim;
    if (c.any([](const Tensor& t) { return t._fw_grad(/*level=*/0).defined(); })) return Decision::forward_mode;
    return std::nullopt;
}

// ---- the call --------------------------------------------------------------------------------------------------------

// volta_fa::fwd wants a contiguous last dimension.
Tensor readable(const Tensor& t) { return t.sym_stride(3) == 1 ? t : t.contiguous(); }

// The mask with all four dimensions.
OptionalTensor bias(const Call& c) {
    if (!c.has_mask()) return std::nullopt;
    Tensor mask = *c.attn_mask;
    while (mask.dim() < 4) mask = mask.unsqueeze(0);
    return mask;
}

Tensor run(const Call& c) {
    const auto seqlen_q = c.q.sym_size(2);
    Tensor k = c.k, v = c.v;
    Options<c10::SymInt> options;
    options.attn_bias = bias(c);
    options.dropout_p = c.dropout_p;
    options.softmax_scale = c.scale;
    options.is_causal = c.is_causal;
    // is_causal is aligned top-left here, query i sees the keys j <= i, and bottom-right in volta_fa:
    // j <= i + seqlen_k - seqlen_q + window_right.
    if (c.is_causal && k.sym_size(2) > seqlen_q) {
        // no query sees these keys; without them the two alignments are one
        k = k.narrow_symint(2, 0, seqlen_q);
        v = v.narrow_symint(2, 0, seqlen_q);
    } else if (c.is_causal && k.sym_size(2) < seqlen_q) {
        options.is_causal = false;
        options.window_right = seqlen_q - k.sym_size(2);
    }
    const auto operand = [](const Tensor& t) { return readable(t).transpose(1, 2); };
    const auto result =
        fwd_op().call(operand(c.q), operand(k), operand(v), VOLTA_FA_OPTION_MEMBERS(options), /*generator=*/std::nullopt);
    return std::get<0>(result).transpose(1, 2);
}

Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& attn_mask,
                                    double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
    if (enabled_on(q.device())) {
        const Call call{q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa};
        const auto reason = reason_to_fall_back(call);
        count(reason ? *reason : traced() ? Decision::traced : Decision::ran);
        if (!reason) return run(call);
    }
    return at::native::scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

c10::Dict<std::string, int64_t> stats() {
    c10::Dict<std::string, int64_t> result;
    for (size_t i = 0; i < decisions.size(); ++i) result.insert(decision_names[i], decisions[i].load());
    return result;
}

void reset_stats() {
    for (auto& n : decisions) n = 0;
}

struct Silence : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

const bool loaded = [] {
    {
        Silence silence;  // PyTorch warns of a kernel that is replaced
        const c10::WarningUtils::WarningHandlerGuard guard(&silence);
        // leaked: as the process ends, other threads may still call the op
        auto* library =
            new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CompositeImplicitAutograd, __FILE__, __LINE__);
        library->impl("scaled_dot_product_attention", scaled_dot_product_attention);
    }
    const auto [cpu, on_first_use] = from_environment();
    configure(cpu, {}, on_first_use);
    return true;
}();

}  // namespace
}  // namespace volta_fa

TORCH_LIBRARY_FRAGMENT(volta_fa, m) {
    m.def("_sdpa_configure(bool cpu, int[] cuda_devices, str on_first_use) -> ()", volta_fa::configure);
    m.def("_sdpa_from_environment() -> (bool, str)", volta_fa::from_environment);
    m.def("_sdpa_serves(int sm, bool newer_devices_too) -> bool",
          [](int64_t sm, bool newer_devices_too) { return volta_fa_serves_sm(static_cast<int32_t>(sm), newer_devices_too); });
    m.def("_sdpa_stats() -> Dict(str, int)", volta_fa::stats);
    m.def("_sdpa_reset_stats() -> ()", volta_fa::reset_stats);
}
