// Implements operators.h, and registers the operators of the tables in Rust with PyTorch's dispatcher: those of src/operators.rs,
// which compute attention, with a kernel for each dispatch key, and those of src/internal.rs, torch.ops.volta_fa._*, with one each
// (_dropout_mask with a second one, for meta tensors).
// VOLTA_FA_LIBRARY... are TORCH_LIBRARY... that do nothing in a second copy of this library (registration.h).

// Operator: a row of the table; Arguments: a call's arguments on the stack; Values: the array of them that Rust reads; Caller:
// calls an operator from C++; boxed: makes a kernel of an object that takes a call's stack
#include "operators.h"

#include "registration.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

namespace volta_fa {
namespace {

// Makes an operator of a row, whose schema Rust passes as text.
Operator read_row(size_t number, char* text, Autocast autocast) {
    auto schema = torch::schema(take_string(text).c_str());
    TORCH_INTERNAL_ASSERT(schema.arguments().size() <= kMaxArguments && schema.returns().size() <= kMaxResults);
    auto name = toString(schema.operator_name());
    return {number, std::move(name), std::move(schema), autocast};
}

// Asks Rust for rows until one is past the last (null).
std::vector<Operator> read_table() {
    std::vector<Operator> found;
    Autocast autocast{};
    while (char* text = volta_fa_operator(found.size(), &autocast)) found.push_back(read_row(found.size(), text, autocast));
    return found;
}

// The kernel of an internal operator: passes a call's arguments to Rust and puts its result on the stack.
struct Internal final : c10::OperatorKernel {
    explicit Internal(const Operator& op) : op(op) {}

    void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) const {
        const Values values(Arguments(op, *stack), /*may_be_symbolic=*/false);
        char* text = nullptr;
        void* tensor = nullptr;
        check(volta_fa_call_internal(op.number, values.data(), op.count(), &text, &tensor));
        torch::jit::drop(*stack, op.count());
        if (text) stack->emplace_back(take_string(text));
        if (tensor) stack->emplace_back(take_tensor(tensor));
    }

    const Operator op;
};

// Registers `kernel` of each operator at the dispatch key of `m`.
template <class Kernel>
void implement(torch::Library& m, const Kernel& kernel) {
    for (const auto& op : operators()) m.impl(op.name.c_str(), kernel(op));
}

void implement_autocast(torch::Library& m, c10::DeviceType device) {
    for (const auto& op : operators()) {
        if (op.autocast != Autocast::Keep) m.impl(op.name.c_str(), autocast_kernel(op, device));
    }
}

void implement_in_place(torch::Library& m) {
    for (const auto& op : operators()) {
        if (op.schema.is_mutable()) m.impl(op.name.c_str(), counting_versions(op));
    }
}

}  // namespace

const std::vector<Operator>& operators() {
    // leaked, because other threads may call an operator while the process ends
    static const auto& table = *new auto(read_table());
    return table;
}

size_t Operator::required() const {
    const auto& all = schema.arguments();
    return std::count_if(all.begin(), all.end(), [](const c10::Argument& a) { return !a.kwarg_only(); });
}

std::optional<size_t> Operator::find(std::string_view argument) const {
    const auto& all = schema.arguments();
    const auto found = std::find_if(all.begin(), all.end(), [&](const c10::Argument& a) { return a.name() == argument; });
    return found == all.end() ? std::nullopt : std::optional<size_t>(found - all.begin());
}

size_t Operator::at(std::string_view argument) const {
    const auto found = find(argument);
    TORCH_INTERNAL_ASSERT(found, name, " has no ", argument);
    return *found;
}

const Tensor& Arguments::tensor(size_t i) const {
    static const Tensor undefined;
    return values_[i].isTensor() ? values_[i].toTensor() : undefined;
}

Values::Values(const Arguments& arguments, bool may_be_symbolic) {
    for (size_t i = 0; i < static_cast<size_t>(arguments.end() - arguments.begin()); ++i) {
        const c10::IValue& v = arguments[i];
        Value& value = values_[i];
        value.tag = Value::Tag::None;
        if (v.isTensor()) {
            set(i, v.toTensor());
        } else if (v.isInt() || v.isSymInt()) {
            value.int_._0 = v.isSymInt() && may_be_symbolic ? size_or_unknown(v.toSymInt()) : v.toInt();
            value.tag = Value::Tag::Int;
        } else if (v.isBool() || v.isSymBool()) {
            value.bool_._0 = v.toBool();
            value.tag = Value::Tag::Bool;
        } else if (v.isDouble() || v.isSymFloat()) {
            value.float_._0 = v.toDouble();
            value.tag = Value::Tag::Float;
        } else if (v.isString()) {
            value.text._0 = v.toStringRef().c_str();
            value.tag = Value::Tag::Text;
        } else {
            // Rust rejects wrong types among the above, with the argument's name. backends.cpp passes a tensor for a generator.
            TORCH_CHECK_VALUE(v.isNone() || v.isGenerator(), "volta_fa: got a ", v.tagKind(),
                              " as an argument, expected a tensor, a number, a bool, a string or None");
        }
    }
}

void Values::set(size_t i, const Tensor& t) {
    values_[i].tensor._0 = const_cast<Tensor*>(&t);
    values_[i].tag = t.defined() ? Value::Tag::Tensor : Value::Tag::None;
}

Caller::Caller(const char* name)
    : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(("volta_fa::" + std::string(name)).c_str(), "")) {
    const auto& all = operators();
    op_ = &*std::find_if(all.begin(), all.end(), [&](const Operator& op) { return op.name == name; });
    for (const auto& argument : op_->schema.arguments()) defaults_.push_back(argument.default_value().value_or(c10::IValue()));
}

bool is_subclass(const Tensor& t) { return t.defined() && t.key_set().has(c10::DispatchKey::Python); }

// Whether a subclass is a DTensor, for which the Python package registers the operators' sharding rules.
bool has_rules(const Tensor& t) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::_has_rules", "").typed<bool(const Tensor&)>();
    // The Python package implements _has_rules. Where it is not loaded there are no rules.
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
    // With these keys the call of _has_rules itself would go to the subclass.
    const c10::impl::ExcludeDispatchKeyGuard guard(
        c10::DispatchKeySet{c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
    return op.call(t);
}

VOLTA_FA_LIBRARY(m) {
    for (size_t number = 0; char* text = volta_fa_internal(number); ++number) {
        const auto op = read_row(number, text, Autocast::Keep);
        // _dropout_mask reads rng_state. A kernel at the default key decomposes the operator, so it also gets fake tensors, which
        // have no memory. CompositeExplicitAutograd leaves them to the kernel at the Meta key.
        const auto key = op.find("rng_state") ? c10::DispatchKey::CompositeExplicitAutograd : c10::DispatchKey::CatchAll;
        m.def(c10::FunctionSchema(op.schema), torch::dispatch(key, boxed<Internal>(op)));
    }
    // python/volta_fa/integrations/dtensor.py implements it: true for a DTensor, after adding its rules
    m.def("_has_rules(Tensor t) -> bool");
    for (const auto& op : operators()) {
        auto tags = std::vector{at::Tag::pt2_compliant_tag};
        if (op.find("generator")) tags.push_back(at::Tag::nondeterministic_seeded);
        m.def(c10::FunctionSchema(op.schema), std::as_const(tags));
    }
}

VOLTA_FA_LIBRARY_IMPL(CPU, m) { implement(m, backend_kernel); }
VOLTA_FA_LIBRARY_IMPL(CUDA, m) { implement(m, backend_kernel); }
VOLTA_FA_LIBRARY_IMPL(Meta, m) {
    implement(m, meta_kernel);
    m.impl("_dropout_mask", [](const Tensor& rng_state, int64_t batch, int64_t nheads, int64_t seqlen_q, int64_t seqlen_k, double) {
        return at::empty({batch, nheads, seqlen_q, seqlen_k}, rng_state.options().dtype(at::kBool));
    });
}
VOLTA_FA_LIBRARY_IMPL(AutocastCPU, m) { implement_autocast(m, c10::DeviceType::CPU); }
VOLTA_FA_LIBRARY_IMPL(AutocastCUDA, m) { implement_autocast(m, c10::DeviceType::CUDA); }
VOLTA_FA_LIBRARY_IMPL(Autograd, m) { implement(m, autograd_kernel); }
VOLTA_FA_LIBRARY_IMPL(ADInplaceOrView, m) { implement_in_place(m); }

}  // namespace volta_fa
