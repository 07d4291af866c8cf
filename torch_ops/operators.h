// The operators of the table in Rust (src/operators.rs), and a call's arguments as they stand on PyTorch's stack.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "rust.h"

namespace volta_fa {

using torch::jit::Stack;

// What kernels know of an operator. They hold it from registration on, because looking it up costs time in each call.
struct Operator {
    size_t number;     // in the table
    std::string name;  // with the overload
    c10::FunctionSchema schema;
    Autocast autocast;

    size_t count() const { return schema.arguments().size(); }
    // Returns the number of required tensors, which come first.
    size_t tensors() const;
    // Returns the place of an argument; nothing if there is none.
    std::optional<size_t> find(std::string_view argument) const;
    // Returns the place of an argument that the operator has.
    size_t at(std::string_view argument) const;
};

// Returns the operators in the table's order.
const std::vector<Operator>& operators();

// Arguments of a call, borrowed from the stack.
class Arguments {
public:
    Arguments(const Operator& op, const Stack& stack) : op_(op), values_(torch::jit::last(stack, op.count())) {}

    const c10::IValue& operator[](size_t i) const { return values_[i]; }
    const c10::IValue& operator[](std::string_view name) const { return values_[op_.at(name)]; }
    // Returns a tensor; an undefined one for None.
    const Tensor& tensor(size_t i) const;
    const Tensor& tensor(std::string_view name) const { return tensor(op_.at(name)); }
    auto begin() const { return values_.begin(); }
    auto end() const { return values_.end(); }

private:
    const Operator& op_;
    at::ArrayRef<c10::IValue> values_;
};

constexpr size_t kMaxArguments = 48;
constexpr size_t kMaxResults = 5;

// Arguments of a call for Rust. They borrow the tensors on the stack.
class Values {
public:
    // Sizes may be symbolic in meta kernels.
    Values(const Arguments& arguments, bool may_be_symbolic);

    void set(size_t i, const Tensor& t);
    const Value* data() const { return values_.data(); }

private:
    std::array<Value, kMaxArguments> values_;
};

// Calls an operator from C++.
class Caller {
public:
    explicit Caller(const char* name);

    const Operator& op() const { return *op_; }
    // Returns a stack with the defaults of all arguments; those of required ones are None.
    const Stack& defaults() const { return defaults_; }
    // Replaces the arguments on the stack by the results.
    void operator()(Stack& stack) const { handle_.callBoxed(stack); }

private:
    const Operator* op_;
    c10::OperatorHandle handle_;
    Stack defaults_;
};

// The kernels of an operator. Boxed ones take a call's arguments from PyTorch's stack, where Python, TorchScript and compiled
// models put them. So they need no parameters, and a few classes serve all operators.
torch::CppFunction backend_kernel(const Operator& op);  // backends.cpp
torch::CppFunction meta_kernel(const Operator& op);  // meta.cpp
torch::CppFunction autocast_kernel(const Operator& op, c10::DeviceType device);  // autocast.cpp
torch::CppFunction autograd_kernel(const Operator& op);  // autograd.cpp
// Refuses tensors that need a gradient, or lets the call pass and raises an error in the backward pass.
torch::CppFunction without_derivative(const Operator& op);  // no_derivative.cpp
// Counts a new version of each tensor that the operator writes, so that autograd sees the write.
torch::CppFunction counting_versions(const Operator& op);  // no_derivative.cpp

template <class Kernel, class... Arguments>
torch::CppFunction boxed(const Arguments&... arguments) {
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(arguments...));
}

// Returns true if the dispatcher calls the tensor's Python class first.
bool is_subclass(const Tensor& t);

// Returns true if volta_fa has sharding rules for the tensor's subclass, which is DTensor alone. The first DTensor loads them from
// Python.
bool has_rules(const Tensor& t);

}  // namespace volta_fa
