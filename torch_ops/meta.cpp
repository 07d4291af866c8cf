// Kernels at the Meta key: they return empty tensors with the sizes and dtypes of an operator's results, for torch.compile and
// fake tensors. Sizes may be symbolic, so the rules are C++. Rust first checks the arguments, as far as sizes are known.
// `Arguments` finds a call's arguments on the stack, by name; `Values` is the array of them that Rust reads (operators.h).

#include "operators.h"  // boxed: makes a kernel of an object that takes a call's stack

#include <ATen/ops/empty.h>

namespace volta_fa {
namespace {

// Returns an operator's results. `columns`, from Rust's check, is what sizes of arguments do not tell: for fwd_kvcache the columns
// that an element of the caches holds, for operators on latents (MLA) the columns of out, for others 0.
using Rule = std::vector<Tensor> (*)(const Arguments& arguments, int64_t columns);

Tensor contiguous_like(const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); }

// Returns out, q's sizes with `columns` in the last place, and softmax_lse, fp32: (batch, nheads, seqlen_q) for dense queries,
// which have 4 dimensions, and (nheads, total_q) for packed ones, which have 3.
std::vector<Tensor> attention(const Tensor& q, const c10::SymInt& columns) {
    c10::SymDimVector out(q.sym_sizes().begin(), q.sym_sizes().end());
    out.back() = columns;
    const auto nheads = q.sym_size(-2), rows = q.sym_size(-3);
    const auto lse = q.dim() == 3 ? c10::SymDimVector{nheads, rows} : c10::SymDimVector{q.sym_size(0), nheads, rows};
    return {at::empty_symint(out, q.options()), at::empty_symint(lse, q.options().dtype(at::kFloat))};
}

// Returns out, softmax_lse and rng_state: int64, seed and offset with dropout, else empty.
std::vector<Tensor> fwd(const Arguments& arguments, int64_t) {
    const Tensor& q = arguments.tensor("q");
    auto found = attention(q, arguments.tensor("v").sym_size(-1));
    const bool draws = arguments["dropout_p"].toDouble() > 0.0;
    found.push_back(at::empty_symint({c10::SymInt(draws ? 2 : 0)}, q.options().dtype(at::kLong)));
    return found;
}

std::vector<Tensor> bwd(const Arguments& arguments, int64_t) {
    const Tensor& q = arguments.tensor("q");
    const auto like = [&](bool there, const Tensor& t) {
        return there && t.defined() ? contiguous_like(t) : at::empty_symint({c10::SymInt(0)}, q.options());
    };
    return {contiguous_like(q), contiguous_like(arguments.tensor("k")), contiguous_like(arguments.tensor("v")),
            like(arguments["attn_bias_requires_grad"].toBool(), arguments.tensor("attn_bias")),
            like(true, arguments.tensor("sinks"))};
}

std::vector<Tensor> fwd_fast(const Arguments& arguments, int64_t) {
    return attention(arguments.tensor("q"), arguments.tensor("v").sym_size(-1));
}

// One byte tensor: K quantized to int8, and what fwd_fast needs with it. CodeSizes::prepared (src/ops/codes.rs) lays it out; both
// must agree. A block is 64 keys with scales of their own. A sequence begins on a block, so each packed one may need one more.
std::vector<Tensor> prepare_fast(const Arguments& arguments, int64_t) {
    const Tensor &k = arguments.tensor("k"), &v = arguments.tensor("v");
    const bool packed = k.dim() == 3;
    const auto rows = k.sym_size(-3), heads = k.sym_size(-2);
    const auto columns = k.sym_size(-1).max(v.sym_size(-1));
    const int64_t headdim = columns <= 64 ? 64 : columns <= 128 ? 128 : 256;  // the kernel's
    const auto batch = packed ? arguments.tensor("cu_seqlens_k").sym_size(0) - 1 : k.sym_size(0);
    const auto seqlen = packed ? rows.min(arguments["max_seqlen_k"].toSymInt()) : rows;
    const auto blocks = packed ? rows / 64 + batch + 1 : batch * ((seqlen + 63) / 64);  // packed: the last one is spare
    // a block: int8 keys and 4 fp32 scales; a sequence: its keys' fp32 mean, and 16 bytes of fp32 maxima of V for each 256 keys
    auto bytes = heads * (blocks * (64 * headdim + 16) + batch * (4 * headdim + (seqlen + 255) / 256 * 16));
    // bf16: V as fp16, headdim_v padded to 8. `rotate` adds 16 unused bytes, so that the size tells rotated keys from others.
    if (k.scalar_type() == at::kBFloat16) bytes = bytes + (packed ? rows : batch * rows) * heads * ((v.sym_size(-1) + 7) / 8 * 16);
    return {at::empty_symint({bytes + (arguments["rotate"].toBool() ? 16 : 0)}, k.options().dtype(at::kByte))};
}

std::vector<Tensor> merge(const Arguments& arguments, int64_t) {
    return {contiguous_like(arguments.tensor("out_a")), contiguous_like(arguments.tensor("softmax_lse_a"))};
}

// `columns`: 2 for an int4 cache, whose elements are bytes; else 1.
std::vector<Tensor> kvcache(const Arguments& arguments, int64_t columns) {
    const auto elements = arguments.tensor("v_cache").sym_size(-1);
    return attention(arguments.tensor("q"), columns > 1 ? elements * columns : elements);
}

// `columns`: those of out, which are a latent's without its columns of positions.
std::vector<Tensor> mla(const Arguments& arguments, int64_t columns) { return attention(arguments.tensor("q"), columns); }

// Returns logits, fp32 (batch, seqlen_q, columns). `columns`: max_seqlen_k beside pages, else the rows of k.
std::vector<Tensor> indexer_logits(const Arguments& arguments, int64_t) {
    const Tensor& q = arguments.tensor("q");
    const auto& given = arguments["max_seqlen_k"];
    const auto columns = given.isNone() ? arguments.tensor("k").sym_size(0) : given.toSymInt();
    return {at::empty_symint({q.sym_size(0), q.sym_size(1), columns}, q.options().dtype(at::kFloat))};
}

// Returns out (total_q, nheads, columns), softmax_lse and max_logits, both fp32 (nheads, total_q).
std::vector<Tensor> sparse_mla(const Arguments& arguments, int64_t columns) {
    const Tensor& q = arguments.tensor("q");
    // a transposed view of (total_q, nheads), as from Rust
    const auto of_heads = [&] { return at::empty_symint({q.sym_size(0), q.sym_size(1)}, q.options().dtype(at::kFloat)).t(); };
    return {attention(q, columns)[0], of_heads(), of_heads()};
}

constexpr std::pair<std::string_view, Rule> kRules[] = {
    {"fwd", fwd},
    {"bwd", bwd},
    {"fwd_fast", fwd_fast},
    {"prepare_fast", prepare_fast},
    {"merge_attention_states", merge},
    {"merge_attention_states_", [](const Arguments&, int64_t) { return std::vector<Tensor>(); }},
    {"fwd_kvcache", kvcache},
    {"fwd_kvcache.append", kvcache},
    {"fwd_mla", mla},
    {"indexer_logits", indexer_logits},
    {"fwd_sparse_mla", sparse_mla},
};

struct Shapes final : c10::OperatorKernel {
    explicit Shapes(const Operator& op) : op(op) {
        for (const auto& [name, of_name] : kRules) {
            if (name == op.name) rule = of_name;
        }
        TORCH_INTERNAL_ASSERT(rule, op.name, " has no rule");
    }

    void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) const {
        const Arguments arguments(op, *stack);
        int64_t columns = 0;
        const Values values(arguments, /*may_be_symbolic=*/true);
        check(volta_fa_check(op.number, values.data(), op.count(), &columns));
        auto results = rule(arguments, columns);
        torch::jit::drop(*stack, op.count());
        for (auto& result : results) stack->emplace_back(std::move(result));
    }

    const Operator& op;
    Rule rule = nullptr;
};

}  // namespace

torch::CppFunction meta_kernel(const Operator& op) { return boxed<Shapes>(op); }

}  // namespace volta_fa
