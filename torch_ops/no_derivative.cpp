// Autograd kernels of the operators without a derivative, all but fwd. A call with tensors that require grad:
//   Refuse      fwd_fast, prepare_fast, merge_attention_states_   raises
//   Inference   fwd_kvcache with its overload                     passes, if no cache that it writes does; its backward raises
//   PyTorch's own fallback, the other operators                   the same
// Beside them `Written`, at another key (ADInplaceOrView), marks arguments that operators write in place.

// Operator: a row of src/operators.rs; Arguments: a call's arguments on the stack, by index or name; boxed: makes a kernel of an
// object that takes a call's stack
#include "operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>

namespace volta_fa {
namespace {

using torch::autograd::variable_list;

// Rejects tensors that need a derivative before the call. Quantization (fwd_fast) has none that training could use. For
// merge_attention_states_, which has no results, PyTorch's fallback would raise nothing and keep the derivative from before.
struct Refuse final : c10::OperatorKernel {
    Refuse(const Operator& op, bool replaces_fwd) : op(op), tensors(op.required()), replaces_fwd(replaces_fwd) {}

    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) const {
        const Arguments arguments(op, *stack);
        for (size_t i = 0; i < tensors; ++i) {
            const Tensor& t = arguments.tensor(i);
            if (!t.defined()) continue;
            const auto& name = op.schema.arguments()[i].name();
            TORCH_CHECK_NOT_IMPLEMENTED(!t.requires_grad() || !at::GradMode::is_enabled(), "volta_fa::", op.name, ": ", name,
                                        ": got a tensor that requires grad, expected none: there is no derivative. "
                                        "Use torch.no_grad()",
                                        replaces_fwd ? " or volta_fa::fwd" : "");
            TORCH_CHECK_NOT_IMPLEMENTED(!t._fw_grad(/*level=*/0).defined(), "volta_fa::", op.name, ": ", name,
                                        ": got a tensor with a tangent, expected none: there is no derivative. ",
                                        replaces_fwd ? "Use volta_fa::fwd" : "Pass its primal");
        }
        const at::AutoDispatchBelowAutograd guard;
        handle.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    }

    const Operator& op;
    const size_t tensors;     // number of the required ones, the first arguments
    const bool replaces_fwd;  // volta_fa::fwd computes the same, with a derivative
};

constexpr char kCacheMessage[] = "volta_fa::fwd_kvcache: the derivative is not implemented: a cache is for inference";

// Graph node between inputs that require grad and the results; its backward raises.
struct NoGradient : torch::autograd::Function<NoGradient> {
    static variable_list forward(torch::autograd::AutogradContext*, at::TensorList, const std::tuple<Tensor, Tensor>& found) {
        return {std::get<0>(found), std::get<1>(found)};
    }
    static variable_list backward(torch::autograd::AutogradContext*, const variable_list&) {
        C10_THROW_ERROR(NotImplementedError, kCacheMessage);
    }
};

// Lets the call pass; the backward pass raises an error. PyTorch's fallback does the same, but it reads the schema in each call.
// That takes an eighth of a decode step's host time. The overload that appends writes caches: it rejects ones that require grad.
struct Inference final : c10::OperatorKernel {
    explicit Inference(const Operator& op) : op(op), appends(op.name != "fwd_kvcache") {}

    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) const {
        const bool needed = needs_gradient(Arguments(op, *stack)) && at::GradMode::is_enabled();
        const auto call = [&] {
            const at::AutoDispatchBelowAutograd guard;
            handle.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
        };
        if (!needed) return call();
        const Arguments arguments(op, *stack);
        TORCH_CHECK(!appends || !(arguments.tensor("k_cache").requires_grad() || arguments.tensor("v_cache").requires_grad()),
                    "volta_fa::fwd_kvcache: k_cache and v_cache are written in place: got one that requires a gradient");
        variable_list inputs;
        for (const auto& argument : arguments) {
            if (argument.isTensor() && argument.toTensor().defined()) inputs.push_back(argument.toTensor());
        }
        call();
        std::tuple<Tensor, Tensor> found;
        torch::jit::pop(*stack, std::get<0>(found), std::get<1>(found));
        auto outputs = NoGradient::apply(at::TensorList(inputs), found);
        torch::jit::push(*stack, std::move(outputs[0]), std::move(outputs[1]));
    }

    static bool needs_gradient(const Arguments& arguments) {
        bool needed = false;
        for (const auto& argument : arguments) {
            if (!argument.isTensor() || !argument.toTensor().defined()) continue;
            const Tensor& t = argument.toTensor();
            TORCH_CHECK_NOT_IMPLEMENTED(!t._fw_grad(/*level=*/0).defined(), kCacheMessage);
            needed |= t.requires_grad();
        }
        return needed;
    }

    const Operator& op;
    const bool appends;  // fwd_kvcache.append
};

// Kernel at the ADInplaceOrView key: increments the version of each tensor that the schema marks as written, as PyTorch's in-place
// operators do. Then a backward pass that saved the tensor before raises. PyTorch's fallback reads the schema in each call.
struct Written final : c10::OperatorKernel {
    explicit Written(const Operator& op) : count(op.count()) {
        for (size_t i = 0; i < op.count(); ++i) {
            const auto* alias = op.schema.arguments()[i].alias_info();
            if (alias && alias->isWrite()) places.push_back(i);
        }
    }

    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) const {
        std::vector<Tensor> written;
        for (const size_t i : places) {
            const auto& value = torch::jit::peek(*stack, i, count);
            // tensors of inference mode have no version
            if (value.isTensor() && value.toTensor().defined() && !value.toTensor().is_inference())
                written.push_back(value.toTensor());
        }
        {
            const at::AutoDispatchBelowADInplaceOrView guard;
            handle.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
        }
        for (const Tensor& t : written) t.unsafeGetTensorImpl()->bump_version();
    }

    std::vector<size_t> places;  // indices of the written arguments
    const size_t count;          // of all arguments
};

}  // namespace

torch::CppFunction counting_versions(const Operator& op) { return boxed<Written>(op); }

torch::CppFunction without_derivative(const Operator& op) {
    if (op.name == "fwd_fast" || op.name == "prepare_fast") {
        return boxed<Refuse>(op, /*replaces_fwd=*/true);
    }
    if (op.name == "merge_attention_states_") {
        return boxed<Refuse>(op, /*replaces_fwd=*/false);
    }
    if (op.name == "fwd_kvcache" || op.name == "fwd_kvcache.append") {
        return boxed<Inference>(op);
    }
    return torch::autograd::autogradNotImplementedFallback();
}

}  // namespace volta_fa
