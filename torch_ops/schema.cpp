// The operator schemas.

#include "ops.h"
#include "rust.h"

#include <torch/library.h>

TORCH_LIBRARY(volta_fa, m) {
    m.def("fwd(Tensor q, Tensor k, Tensor v, *, " VOLTA_FA_OPTION_SCHEMA
          ", Generator? generator=None) -> (Tensor out, Tensor softmax_lse, Tensor rng_state)",
          {at::Tag::pt2_compliant_tag});
    m.def("bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, *, "
          "Tensor? rng_state=None, " VOLTA_FA_OPTION_SCHEMA
          ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dattn_bias, Tensor dsinks)",
          {at::Tag::pt2_compliant_tag});
    // For our own tools and tests, not part of the interface: JSON about the build, and timed simulations.
    m.def("_info() -> str", [] { return volta_fa::take_string(volta_fa_info()); });
    m.def("_sim_report() -> str", [] { return volta_fa::take_string(volta_fa_take_simulations()); });
}
