// Registers the internal operators, torch.ops.volta_fa._*, through which the Python package, its tools and tests call Rust
// (src/ffi.rs). Most return JSON. The public operators are in operators.cpp.

#include "registration.h"
#include "rust.h"

#include <optional>

namespace volta_fa {
namespace {

// Returns the JSON that a function of Rust writes to its last argument.
template <class Function, class... Arguments>
std::string json_of(const Function& function, const Arguments&... arguments) {
    char* json = nullptr;
    check(function(arguments..., &json));
    return take_string(json);
}

std::string plan(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t nheads, int64_t nheads_k, int64_t headdim,
                 int64_t headdim_v, bool is_causal, int64_t sms, int64_t major, int64_t minor, int64_t shared_bytes,
                 bool deterministic, const std::string& names, std::optional<int64_t> device) {
    const PlanArgs args{batch,   seqlen_q,     seqlen_k,      nheads,        nheads_k,
                        headdim, headdim_v,    is_causal,     sms,           major,
                        minor,   shared_bytes, deterministic, names.c_str(), device ? &*device : nullptr};
    return json_of(volta_fa_plan, &args);
}

std::string families(int64_t major, int64_t minor) {
    return json_of(volta_fa_families, static_cast<int32_t>(major), static_cast<int32_t>(minor));
}

void set_tuning(const std::string& text) { check(volta_fa_set_tuning(text.c_str())); }

std::string tuning(int64_t device) { return json_of(volta_fa_tuning, device); }

void preload(const std::string& kernel, int64_t device) { check(volta_fa_preload(kernel.c_str(), device)); }

at::Tensor dropout_mask(const at::Tensor& rng_state, int64_t batch, int64_t nheads, int64_t seqlen_q, int64_t seqlen_k,
                        double dropout_p) {
    const at::Tensor on_cpu = rng_state.cpu();
    const DropoutMaskArgs args{const_cast<at::Tensor*>(&on_cpu), batch, nheads, seqlen_q, seqlen_k, dropout_p};
    void* mask = nullptr;
    check(volta_fa_dropout_mask(&args, &mask));
    return take_tensor(mask).to(rng_state.device());
}

}  // namespace
}  // namespace volta_fa

VOLTA_FA_LIBRARY(m) {
    // JSON: this build's kernels and limits, and this machine
    m.def("_info() -> str", [] { return volta_fa::take_string(volta_fa_info()); });
    // JSON: the kernels that a shape would run. `features`: comma-separated names, as in _info(), of what else the call uses. sms
    // (multiprocessors), major, minor (compute capability) and shared_bytes (of a block at most) describe a GPU, by default a V100.
    // `device` names one of this machine instead, -1 the simulator's.
    m.def(
        "_plan(int batch, int seqlen_q, int seqlen_k, int nheads, int nheads_k, int headdim, int headdim_v, "
        "bool is_causal, int sms=80, int major=7, int minor=0, int shared_bytes=98304, bool deterministic=False, "
        "str features='', int? device=None) -> str",
        volta_fa::plan);
    // A tuning, the JSON that `python -m volta_fa check --tune` writes, overrides the planner's choice of kernels. `text` replaces
    // all files until it is set to "". _tuning returns JSON about a device's file.
    m.def("_set_tuning(str text) -> ()", volta_fa::set_tuning);
    m.def("_tuning(int device) -> str", volta_fa::tuning);
    // loads a kernel ahead of its first launch
    m.def("_preload(str kernel, int device) -> ()", volta_fa::preload);
    // JSON: the families of kernels (Volta, Turing) that a compute capability runs
    m.def("_families(int major, int minor) -> str", volta_fa::families);
    // bool (batch, nheads, seqlen_q, seqlen_k): true for each probability that dropout with this random state keeps
    m.def("_dropout_mask(Tensor rng_state, int batch, int nheads, int seqlen_q, int seqlen_k, float dropout_p) -> Tensor",
          volta_fa::dropout_mask);
    // JSON: launches that the simulator timed since the last call
    m.def("_sim_report() -> str", [] { return volta_fa::take_string(volta_fa_take_simulations()); });
}
