// Kernels at the key Autograd, which operators.cpp registers. volta_fa::fwd records a graph node, `Attention`, if an input requires
// grad. The node's backward calls volta_fa::bwd. Every other operator, bwd included, has no derivative (no_derivative.cpp).

// Arguments: a call's arguments on the stack, by index (tensor(i) is undefined for None). Caller: calls an operator from C++.
// boxed: makes a kernel of an object that takes a call's stack. has_rules: true for a DTensor, for which volta_fa has rules.
#include "operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

namespace volta_fa {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// fwd and bwd, and the arguments that both have: tensors such as q, and options such as is_causal. The node saves all of these.
struct Pair {
    struct Shared {
        std::string name;
        bool is_tensor;
        size_t in_fwd, in_bwd;  // indices in the schemas
    };

    Pair() {
        const auto& all = fwd.op().schema.arguments();
        for (size_t i = 0; i < all.size(); ++i) {
            const auto in_bwd = bwd.op().find(all[i].name());  // its index; nothing if bwd does not have it
            if (in_bwd) shared.push_back({all[i].name(), all[i].type()->isSubtypeOf(*c10::OptionalType::ofTensor()), i, *in_bwd});
        }
    }

    const Caller fwd{"fwd"}, bwd{"bwd"};  // call the operators through the dispatcher; op() is the row with the schema
    const size_t attn_bias = fwd.op().at("attn_bias"), sinks = fwd.op().at("sinks");
    std::vector<Shared> shared;
};

const Pair& ops() {
    static const Pair& pair = *new Pair;  // leaked, because other threads may call fwd while the process ends
    return pair;
}

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

struct Attention : torch::autograd::Function<Attention> {
    // The tensors are those that may need a gradient: q, k, v, attn_bias, sinks. The stack has all arguments of fwd, also these.
    static variable_list forward(AutogradContext* ctx, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor& attn_bias,
                                 const OptionalTensor&, Stack* stack) {
        const Arguments arguments(ops().fwd.op(), *stack);
        variable_list saved;
        // Saves only options that differ from bwd's defaults, because each entry takes time. Each option is an entry, not an
        // element of one list: compiled autograd makes a list's numbers constants of its graph, and a scale of 0 there
        // stands for None.
        for (const auto& argument : ops().shared) {
            if (argument.is_tensor) {
                saved.push_back(arguments.tensor(argument.in_fwd));
            } else if (arguments[argument.in_fwd] != ops().bwd.defaults()[argument.in_bwd]) {
                ctx->saved_data[argument.name] = arguments[argument.in_fwd];
            }
        }
        ctx->saved_data["attn_bias_requires_grad"] = attn_bias && attn_bias->requires_grad();
        {
            at::AutoDispatchBelowADInplaceOrView guard;  // calls the backend kernel
            ops().fwd(*stack);
        }
        Tensor out, softmax_lse, rng_state;
        torch::jit::pop(*stack, out, softmax_lse, rng_state);
        saved.insert(saved.end(), {out, softmax_lse, rng_state});
        ctx->save_for_backward(std::move(saved));
        // rng_state has integers, so it needs no mark as not differentiable. Compiled autograd takes no node with such a mark.
        // Gradients of outputs without a use stay undefined, which saves zeros, and bwd the work for softmax_lse's gradient.
        ctx->set_materialize_grads(false);
        return {out, softmax_lse, rng_state};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        variable_list gradients(6);  // of forward's parameters after ctx; undefined where there is none, as for the stack
        const Tensor &dout = grads[0], &dlse = grads[1];  // gradients of out and of softmax_lse
        if (!dout.defined() && !dlse.defined()) return gradients;
        const Caller& bwd = ops().bwd;
        static const size_t out = bwd.op().at("out"), softmax_lse = bwd.op().at("softmax_lse"), sinks = bwd.op().at("sinks");
        static const size_t rng_state = bwd.op().at("rng_state"), deterministic = bwd.op().at("deterministic");
        static const size_t dlse_at = bwd.op().at("dlse"), bias_requires_grad = bwd.op().at("attn_bias_requires_grad");
        Stack stack = bwd.defaults();
        const auto saved = ctx->get_saved_variables();
        auto next = saved.begin();
        for (const auto& argument : ops().shared) {
            if (argument.is_tensor) stack[argument.in_bwd] = optional(*next++);
        }
        for (const auto& [name, value] : ctx->saved_data) stack[bwd.op().at(name)] = value;
        stack[out] = *next++;
        stack[softmax_lse] = *next++;
        stack[rng_state] = optional(*next++);
        // bwd's first argument
        stack[0] = dout.defined() ? dout : at::zeros_like(stack[out].toTensor());
        stack[dlse_at] = optional(dlse);
        if (at::globalContext().deterministicAlgorithms()) stack[deterministic] = true;
        // which of bwd's results, dq, dk, dv, dattn_bias and dsinks, are gradients; the others have no elements
        const std::array<bool, 5> expected{true, true, true, stack[bias_requires_grad].toBool(), !stack[sinks].isNone()};
        // Grad mode is on with create_graph=True, where bwd's Autograd kernel makes a second derivative raise. Otherwise skips that
        // kernel, because it reads the schema in each call.
        std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
        if (!at::GradMode::is_enabled()) guard.emplace();
        bwd(stack);
        for (size_t i = 0; i < expected.size(); ++i) {
            if (expected[i]) gradients[i] = std::move(stack[i]).toTensor();
        }
        return gradients;
    }
};

// Kernel of fwd at the Autograd key. Without an input that requires grad it builds no node.
struct Differentiable final : c10::OperatorKernel {
    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) const {
        const Arguments arguments(ops().fwd.op(), *stack);
        const Tensor q = arguments.tensor(0), k = arguments.tensor(1), v = arguments.tensor(2);
        const OptionalTensor attn_bias = optional(arguments.tensor(ops().attn_bias)),
                             sinks = optional(arguments.tensor(ops().sinks));
        const auto any = [&](const auto& condition) {
            const auto holds = [&](const Tensor& t) { return t.defined() && condition(t); };
            return holds(q) || holds(k) || holds(v) || (attn_bias && condition(*attn_bias)) || (sinks && condition(*sinks));
        };
        TORCH_CHECK_NOT_IMPLEMENTED(!any([](const Tensor& t) { return t._fw_grad(/*level=*/0).defined(); }),
                                    "volta_fa::fwd: forward-mode derivatives (torch.func.jvp) are not implemented");
        if (is_subclass(q)) has_rules(q);  // a DTensor: loads its sharding rules of volta_fa's operators
        const bool is_complete = q.defined() && k.defined() && v.defined();  // Rust rejects None
        if (!is_complete || !at::GradMode::is_enabled() || !any([](const Tensor& t) { return t.requires_grad(); })) {
            at::AutoDispatchBelowADInplaceOrView guard;
            return handle.callBoxed(*stack);
        }
        auto outputs = Attention::apply(q, k, v, attn_bias, sinks, stack);
        torch::jit::push(*stack, std::move(outputs[0]), std::move(outputs[1]), std::move(outputs[2]));
    }
};

}  // namespace

torch::CppFunction autograd_kernel(const Operator& op) {
    return op.name == "fwd" ? boxed<Differentiable>() : without_derivative(op);
}

}  // namespace volta_fa
