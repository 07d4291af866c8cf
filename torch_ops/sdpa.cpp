// Runs PyTorch's own scaled_dot_product_attention with volta_fa.
//
// aten::scaled_dot_product_attention is a composite op: it chooses an implementation and calls it. This file replaces its
// composite kernel by one that calls volta_fa::fwd, or volta_fa::fwd_fast if that is asked for. If volta_fa is off or cannot
// compute a call, the kernel calls PyTorch's composite. At this level there is no metadata of fused implementations to imitate.
// Grouped heads and headdims up to 512 work, and torch.compile sees volta_fa::fwd in its graph.
//
// The replacement is composite like the original. With a kernel at a backend or autograd key, torch.export would keep the op in
// graphs that must be decomposed, and torch.compile, which remembers a call's key, would not notice it after a first trace.
//
// Loading the library replaces the kernel once, because dispatch tables must not change while other threads call the op.
// Atomics, one bit per device, switch volta_fa on and off. python/volta_fa/integrations/sdpa.py (enable_sdpa, sdpa_stats) sets and
// reads them through the internal operators at the end of this file.

#include "operators.h"
#include "registration.h"

#include <ATen/Context.h>
#include <ATen/core/Dict.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <string>

namespace volta_fa {
namespace {

// ---- enabled devices -------------------------------------------------------------------------------------------------

constexpr const char* variable = "VOLTA_FA_ENABLE_SDPA";  // of the environment
constexpr int64_t max_devices = 64;

std::atomic<bool> cpu_enabled{false};
// bit i is CUDA device i
std::atomic<uint64_t> cuda_enabled{0};
std::atomic<uint64_t> cuda_undecided{0};  // `decide` moves these to enabled or disabled at their first call

std::mutex configuring;  // protects changes of the above and the three below
std::atomic<bool> fast_enabled{false};  // whether calls that need no gradient may run volta_fa::fwd_fast
bool newer_devices_too{false};          // "force": undecided devices may run kernels through PTX, not only native code
uint64_t warned_of{0};                  // bits of the devices for which a warning was shown

// Enables or disables a device at its first call, by its compute capability. The library reads the environment variable when it
// loads; CUDA, which knows the capability, must not be initialized then.
void decide(int64_t device) {
    std::string refused;
    {
        const std::lock_guard<std::mutex> lock(configuring);
        const uint64_t bit = uint64_t{1} << device;
        if (!(cuda_undecided & bit)) return;
        int32_t sm = 0;
        const Status status = volta_fa_device_sm(device, &sm);  // sm: 70 for compute capability 7.0
        // in Rust: true if volta_fa's kernels run every call on this architecture
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

// Enables the CPU, if `cpu`, and the named CUDA devices, and disables all others. But if on_first_use is "1" or "force", each other
// CUDA device is decided at its first call. `fast`: calls that `runs_fast` accepts run volta_fa::fwd_fast.
void configure(bool cpu, at::IntArrayRef cuda_devices, std::string_view on_first_use, bool fast) {
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
    fast_enabled = fast;
}

// Reads VOLTA_FA_ENABLE_SDPA once, when the library loads. Returns configure()'s arguments `cpu` and `on_first_use`.
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
    ran,     // on volta_fa
    traced,  // recorded for volta_fa by a tracer, such as torch.compile
    // reasons to run PyTorch's implementation
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

// Names of decisions in sdpa_stats(); docs/guides/sdpa.md explains each.
constexpr std::array<const char*, static_cast<size_t>(Decision::count)> decision_names = {
    "ran",     "traced", "attn_mask", "dropout",     "dtype", "forward_mode", "functorch",
    "headdim", "layout", "scale",     "sdpa_kernel", "shape", "subclass"};

std::array<std::atomic<int64_t>, decision_names.size()> decisions{};

// calls counted as `ran` or `traced` that volta_fa::fwd_fast runs
std::atomic<int64_t> fast_calls{0};

void count(Decision decision) { decisions[static_cast<size_t>(decision)].fetch_add(1, std::memory_order_relaxed); }

// ---- the decision ----------------------------------------------------------------------------------------------------

// Arguments of scaled_dot_product_attention; q, k and v are (batch, heads, seqlen, headdim).
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

// Returns true while PyTorch records a graph or only computes shapes. Modes of users (FlopCounterMode, selective checkpointing)
// have other keys, and calls under them are eager.
bool traced() {
    using c10::impl::TorchDispatchModeKey;
    using c10::impl::TorchDispatchModeTLS;
    return TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE) ||
           TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY) ||
           TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL);
}

// Returns true if torch.nn.attention.sdpa_kernel allows a fused implementation that volta_fa replaces; on the CPU, only flash.
bool fused_allowed(const Call& c) {
    const auto& context = at::globalContext();
    return context.userEnabledFlashSDP() || (c.q.is_cuda() && context.userEnabledMemEfficientSDP());
}

// Largest headdim of each CUDA device; 0: not looked up yet.
std::array<std::atomic<int64_t>, max_devices> cuda_max_headdim{};

int64_t max_headdim(const at::Device& device) {
    if (!device.is_cuda()) return volta_fa_max_headdim(/*sm=*/0);  // 0: the CPU
    auto& found = cuda_max_headdim[device.index()];
    if (found == 0) {
        int32_t sm = 0;
        check(volta_fa_device_sm(device.index(), &sm));
        found = volta_fa_max_headdim(sm);
    }
    return found;
}

bool needs_gradient(const Call& c) {
    return at::GradMode::is_enabled() && c.any([](const Tensor& t) { return t.requires_grad(); });
}

bool dtype_supported(const Call& c) {
    const auto dtype = c.q.scalar_type();
    if (c.k.scalar_type() != dtype || c.v.scalar_type() != dtype) return false;
    if (dtype == at::kHalf || dtype == at::kBFloat16) return true;
    return dtype == at::kFloat || (dtype == at::kDouble && c.q.is_cpu());
}

// Returns true for tensors of rank 4 with equal batch, lengths and headdim that fit, and matching heads, without broadcast.
bool shape_supported(const Call& c) {
    if (c.q.dim() != 4 || c.k.dim() != 4 || c.v.dim() != 4) return false;
    const auto &q = c.q.sym_sizes(), &k = c.k.sym_sizes(), &v = c.v.sym_sizes();
    if (q[0] != k[0] || k[0] != v[0] || k[1] != v[1] || k[2] != v[2] || q[3] != k[3]) return false;
    return c.enable_gqa ? k[1] > 0 && q[1] % k[1] == 0 : q[1] == k[1];
}

// Returns true for masks that PyTorch accepts: rank 2 to 4, broadcast to (batch, heads, seqlen_q, seqlen_k), without is_causal.
bool mask_supported(const Call& c) {
    if (!c.has_mask()) return true;
    const Tensor& mask = *c.attn_mask;
    const auto dtype = mask.scalar_type();
    if (dtype != at::kBool && dtype != at::kFloat && dtype != c.q.scalar_type()) return false;
    if (c.is_causal || mask.dim() < 2 || mask.dim() > 4) return false;
    const std::array<c10::SymInt, 4> full = {c.q.sym_size(0), c.q.sym_size(1), c.q.sym_size(2), c.k.sym_size(2)};
    for (int64_t i = 1; i <= mask.dim(); ++i) {
        // equality first: a size that torch.export does not know equals itself, but whether it is 1 would become a condition
        const auto size = mask.sym_size(-i);
        if (size != full[4 - i] && size != 1) return false;
    }
    return true;
}

bool headdim_supported(const Tensor& t) { return t.sym_size(3) >= 1 && t.sym_size(3) <= max_headdim(t.device()); }

// Returns the reason to run PyTorch's implementation; nothing if volta_fa can compute the call. Wrong arguments (a mask of another
// dtype, tensors on several devices) are a reason too: PyTorch then raises its own error.
std::optional<Decision> reason_to_fall_back(const Call& c) {
    if (!fused_allowed(c)) return Decision::sdpa_kernel;
    // nested and sparse tensors
    if (c.any([](const Tensor& t) { return t.is_nested() || t.layout() != at::kStrided; })) return Decision::layout;
    // fwd takes it in fp32
    if (c.scale && !(std::abs(*c.scale) <= std::numeric_limits<float>::max())) return Decision::scale;
    if (!(c.dropout_p >= 0.0 && c.dropout_p < 1.0)) return Decision::dropout;
    if (!dtype_supported(c)) return Decision::dtype;
    constexpr c10::DispatchKeySet functorch{c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper};
    if (c.any([&](const Tensor& t) { return t.key_set().has_any(functorch); })) return Decision::functorch;
    // A subclass other than DTensor has rules for PyTorch's ops but not for volta_fa's. Under a tracer all subclasses pass, because
    // tracers have subclasses of their own.
    if (!traced() && c.any([](const Tensor& t) { return is_subclass(t) && !has_rules(t); })) return Decision::subclass;
    if (!shape_supported(c) || c.any([&](const Tensor& t) { return t.device() != c.q.device(); })) return Decision::shape;
    if (!mask_supported(c)) return Decision::attn_mask;
    if (!headdim_supported(c.q) || !headdim_supported(c.v)) return Decision::headdim;
    if (c.any([](const Tensor& t) { return t._fw_grad(/*level=*/0).defined(); })) return Decision::forward_mode;
    return std::nullopt;
}

// ---- the call --------------------------------------------------------------------------------------------------------

// Returns a tensor with a contiguous last dimension, which volta_fa::fwd requires.
Tensor readable(const Tensor& t) { return t.sym_stride(3) == 1 ? t : t.contiguous(); }

// Returns the mask with four dimensions, for the argument attn_bias of fwd or attn_mask of fwd_fast.
OptionalTensor bias(const Call& c) {
    if (!c.has_mask()) return std::nullopt;
    Tensor mask = *c.attn_mask;
    while (mask.dim() < 4) mask = mask.unsqueeze(0);
    return mask;
}

// Returns true for calls that volta_fa::fwd_fast, with its int8 scores, may run: fp16 or bf16, without dropout, gradient
// or a mask that is added to scores. DTensor has no rule for fwd_fast.
bool runs_fast(const Call& c) {
    if (!fast_enabled || c.dropout_p > 0.0 || !at::isReducedFloatingType(c.q.scalar_type())) return false;
    if (c.has_mask() && c.attn_mask->scalar_type() != at::kBool) return false;
    if (needs_gradient(c)) return false;
    return !c.any([](const Tensor& t) { return is_subclass(t) && has_rules(t); });
}

// Returns a copy of `out` with the strides that at::empty_like(q) has; q and `out` have one shape, and q's last stride is 1.
Tensor copied_as(const Tensor& q, const Tensor& out) {
    const Tensor like = at::empty_like(q);
    const auto strides = like.sym_strides();
    // torch.export has no value for a stride that depends on data, so such strides have no order
    const bool ordered =
        std::all_of(strides.begin(), strides.end(), [](const c10::SymInt& s) { return !s.is_symbolic() || s.has_hint(); });
    if (!traced() || !ordered) return like.copy_(out);
    // copy_ becomes aten::copy in an exported program that is decomposed. It has no derivative, and clone has one.
    std::array<int64_t, 4> order = {0, 1, 2, 3}, back{};  // dimensions from the largest stride of q on; where each is there
    std::stable_sort(order.begin(), order.end() - 1, [&](int64_t a, int64_t b) {
        // at equal strides, all but one dimension have size 1
        return strides[a] == strides[b] ? like.sym_size(a) > like.sym_size(b) : strides[a] > strides[b];
    });
    for (size_t i = 0; i < order.size(); ++i) back[order[i]] = static_cast<int64_t>(i);
    return out.permute(order).clone(at::MemoryFormat::Contiguous).permute(back);
}

// Returns `out`, a transposed view of (batch, seqlen_q, heads, headdim_v) memory, with the strides of PyTorch's own result. On
// a GPU that is such a view too. On the CPU its fused kernel returns q's layout; other calls (`no_kernel`) are contiguous.
Tensor laid_out(const Call& c, const Tensor& out) {
    if (!c.q.is_cpu()) return out;
    const auto strided = [](const Tensor& t) { return t.sym_stride(3) != 1; };
    // the kernel takes masks of two and of four dimensions
    const bool other_mask = c.has_mask() && (c.attn_mask->requires_grad() || c.attn_mask->dim() == 3);
    const bool no_kernel =
        c.dropout_p > 0.0 || c.q.sym_size(3) != c.v.sym_size(3) || other_mask || strided(c.q) || strided(c.k) || strided(c.v);
    return no_kernel ? out.clone(at::MemoryFormat::Contiguous) : copied_as(c.q, out);
}

// fwd or fwd_fast, called through the dispatcher (Caller), and indices of arguments that come from PyTorch's. `mask`: name of one.
struct Target : Caller {
    Target(const char* name, std::string_view mask)
        : Caller(name), mask(op().at(mask)), softmax_scale(op().at("softmax_scale")), is_causal(op().at("is_causal")),
          window_right(op().at("window_right")) {}

    const size_t mask, softmax_scale, is_causal, window_right;
};

Tensor run(const Call& c) {
    // leaked, because other threads may call the op while the process ends
    static const Target &fwd = *new Target("fwd", "attn_bias"), &fast = *new Target("fwd_fast", "attn_mask");
    static const size_t dropout_p = fwd.op().at("dropout_p");
    const bool is_fast = runs_fast(c);
    const Target& target = is_fast ? fast : fwd;
    Stack stack = target.defaults();
    const auto seqlen_q = c.q.sym_size(2);
    Tensor k = c.k, v = c.v;
    stack[target.mask] = bias(c);
    stack[target.softmax_scale] = c.scale;
    stack[target.is_causal] = c.is_causal;
    // PyTorch aligns is_causal top-left: query i sees keys j <= i. volta_fa: j <= i + seqlen_k - seqlen_q + window_right.
    if (c.is_causal && k.sym_size(2) > seqlen_q) {
        // no query sees the keys removed here; without them the alignments are equal
        k = k.narrow_symint(2, 0, seqlen_q);
        v = v.narrow_symint(2, 0, seqlen_q);
    } else if (c.is_causal && k.sym_size(2) < seqlen_q) {
        stack[target.is_causal] = false;
        stack[target.window_right] = seqlen_q - k.sym_size(2);
    }
    // volta_fa's operands are (batch, seqlen, heads, headdim)
    const Tensor* const operands[] = {&c.q, &k, &v};
    for (size_t i = 0; i < 3; ++i) stack[i] = readable(*operands[i]).transpose(1, 2);
    if (is_fast) {
        fast_calls.fetch_add(1, std::memory_order_relaxed);
    } else {
        stack[dropout_p] = c.dropout_p;
    }
    target(stack);
    return laid_out(c, stack[0].toTensor().transpose(1, 2));
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
    result.insert("fast", fast_calls.load());
    return result;
}

void reset_stats() {
    for (auto& n : decisions) n = 0;
    fast_calls = 0;
}

struct Silence : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

const bool loaded = [] {
    if (!is_first_copy()) return false;  // another volta_fa library in the process replaces the kernel (registration.cpp)
    {
        Silence silence;  // PyTorch warns about replaced kernels
        const c10::WarningUtils::WarningHandlerGuard guard(&silence);
        // leaked, because other threads may call the op while the process ends
        auto* library =
            new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CompositeImplicitAutograd, __FILE__, __LINE__);
        library->impl("scaled_dot_product_attention", scaled_dot_product_attention);
    }
    const auto [cpu, on_first_use] = from_environment();
    configure(cpu, {}, on_first_use, /*fast=*/false);
    return true;
}();

}  // namespace
}  // namespace volta_fa

VOLTA_FA_LIBRARY_FRAGMENT(m) {
    m.def("_sdpa_configure(bool cpu, int[] cuda_devices, str on_first_use, bool fast=False) -> ()", volta_fa::configure);
    m.def("_sdpa_from_environment() -> (bool, str)", volta_fa::from_environment);
    m.def("_sdpa_serves(int sm, bool newer_devices_too) -> bool",
          [](int64_t sm, bool newer_devices_too) { return volta_fa_serves_sm(static_cast<int32_t>(sm), newer_devices_too); });
    m.def("_max_headdim(int sm) -> int", [](int64_t sm) { return volta_fa_max_headdim(static_cast<int32_t>(sm)); });
    m.def("_sdpa_stats() -> Dict(str, int)", volta_fa::stats);
    m.def("_sdpa_reset_stats() -> ()", volta_fa::reset_stats);
}
