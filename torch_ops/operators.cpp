// Registers the operators of the table in Rust (src/operators.rs) with PyTorch's dispatcher: schemas first, then a kernel for each
// dispatch key. VOLTA_FA_LIBRARY... are TORCH_LIBRARY... that do nothing in a second copy of this library (registration.h).

#include "operators.h"

#include "registration.h"

#include <algorithm>

namespace volta_fa {
namespace {

// Asks Rust for rows until one is past the last (null).
std::vector<Operator> read_table() {
    std::vector<Operator> found;
    Autocast autocast{};
    while (char* text = volta_fa_operator(found.size(), &autocast)) {
        const auto schema = torch::schema(take_string(text).c_str());
        TORCH_INTERNAL_ASSERT(schema.arguments().size() <= kMaxArguments && schema.returns().size() <= kMaxResults);
        found.push_back({found.size(), toString(schema.operator_name()), schema, autocast});
    }
    return found;
}

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

size_t Operator::tensors() const {
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
        value.tag = ValueTag::None;
        if (v.isTensor()) {
            set(i, v.toTensor());
        } else if (v.isInt() || v.isSymInt()) {
            value.payload.integer = v.isSymInt() && may_be_symbolic ? known(v.toSymInt()) : v.toInt();
            value.tag = ValueTag::Int;
        } else if (v.isBool() || v.isSymBool()) {
            value.payload.boolean = v.toBool();
            value.tag = ValueTag::Bool;
        } else if (v.isDouble() || v.isSymFloat()) {
            value.payload.number = v.toDouble();
            value.tag = ValueTag::Float;
        } else {
            // Rust rejects wrong types among the above, with the argument's name. backends.cpp passes a tensor for a generator.
            TORCH_CHECK_VALUE(v.isNone() || v.isGenerator(), "volta_fa: got a ", v.tagKind(),
                              " as an argument, expected a tensor, a number, a bool or None");
        }
    }
}

void Values::set(size_t i, const Tensor& t) {
    values_[i].payload.tensor = const_cast<Tensor*>(&t);
    values_[i].tag = t.defined() ? ValueTag::Tensor : ValueTag::None;
}

Caller::Caller(const char* name)
    : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(("volta_fa::" + std::string(name)).c_str(), "")) {
    const auto& all = operators();
    op_ = &*std::find_if(all.begin(), all.end(), [&](const Operator& op) { return op.name == name; });
    for (const auto& argument : op_->schema.arguments()) defaults_.push_back(argument.default_value().value_or(c10::IValue()));
}

VOLTA_FA_LIBRARY_FRAGMENT(m) {
    for (const auto& op : operators()) {
        auto tags = std::vector{at::Tag::pt2_compliant_tag};
        if (op.find("generator")) tags.push_back(at::Tag::nondeterministic_seeded);
        m.def(c10::FunctionSchema(op.schema), std::as_const(tags));
    }
}

VOLTA_FA_LIBRARY_IMPL(CPU, m) { implement(m, backend_kernel); }
VOLTA_FA_LIBRARY_IMPL(CUDA, m) { implement(m, backend_kernel); }
VOLTA_FA_LIBRARY_IMPL(Meta, m) { implement(m, meta_kernel); }
VOLTA_FA_LIBRARY_IMPL(AutocastCPU, m) { implement_autocast(m, c10::DeviceType::CPU); }
VOLTA_FA_LIBRARY_IMPL(AutocastCUDA, m) { implement_autocast(m, c10::DeviceType::CUDA); }
VOLTA_FA_LIBRARY_IMPL(Autograd, m) { implement(m, autograd_kernel); }
VOLTA_FA_LIBRARY_IMPL(ADInplaceOrView, m) { implement_in_place(m); }

}  // namespace volta_fa
