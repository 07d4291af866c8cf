// Declarations that the kernels of torch.ops.volta_fa share. src/operators.rs has the table of operators: schemas, and the Rust
// functions that check and compute a call. operators.cpp registers each row with PyTorch's dispatcher, once for each dispatch key
// (CPU, CUDA, Meta, Autocast..., Autograd, ADInplaceOrView). The kernels are boxed: they find a call's arguments on a stack.
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

// A row of the table. Kernels hold it from registration on, because looking it up costs time in each call.
struct Operator {
    size_t number;     // the row, by which Rust finds it
    std::string name;  // without the namespace; with the overload, as fwd_kvcache.append
    c10::FunctionSchema schema;
    // Which tensors autocast casts. Keep: none; Region: the required ones; Cache: the required ones that are not KV caches.
    Autocast autocast;

    size_t count() const { return schema.arguments().size(); }
    // Returns the number of required arguments, those before `*` in the schema. All are tensors.
    size_t required() const;
    // Returns the index of an argument in the schema; nothing if the operator does not have it.
    std::optional<size_t> find(std::string_view argument) const;
    // Returns the index of an argument that the operator must have; else fails an internal assertion.
    size_t at(std::string_view argument) const;
};

// Returns the table; reads it from Rust at the first call.
const std::vector<Operator>& operators();

// Arguments of a call, borrowed from the end of the stack, by index or name.
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

// Limits of a schema, asserted when its row is read. A call's arrays have these sizes, so it allocates none.
constexpr size_t kMaxArguments = 48;  // some more than fwd_kvcache.append has, which has most
constexpr size_t kMaxResults = 5;  // MAX_RESULTS of src/operators.rs: Rust writes this many

// Arguments of a call as Rust reads them: the enum of src/value.rs, in C++ a tag and a union. They borrow the tensors on the stack.
class Values {
public:
    // `may_be_symbolic`: passes symbolic ints as unknown, for meta kernels. Otherwise reads values, and a trace guards on them.
    Values(const Arguments& arguments, bool may_be_symbolic);

    // Replaces argument i; None for an undefined tensor. Borrows `t`.
    void set(size_t i, const Tensor& t);
    const Value* data() const { return values_.data(); }

private:
    std::array<Value, kMaxArguments> values_;
};

// Calls an operator from C++ through the dispatcher.
class Caller {
public:
    // `name`: of an operator without an overload.
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

// The kernels of an operator. Python, TorchScript and compiled models put a call's arguments on the stack. So boxed kernels need no
// C++ parameters, and a few classes serve all operators.
torch::CppFunction backend_kernel(const Operator& op);  // computes, on the CPU or CUDA (backends.cpp)
torch::CppFunction meta_kernel(const Operator& op);  // computes sizes and dtypes of results (meta.cpp)
torch::CppFunction autocast_kernel(const Operator& op, c10::DeviceType device);  // casts, then calls again (autocast.cpp)
torch::CppFunction autograd_kernel(const Operator& op);  // fwd: records bwd; others: without_derivative() (autograd.cpp)
// Rejects tensors that need a gradient, or lets the call pass and raises an error in the backward pass (no_derivative.cpp).
torch::CppFunction without_derivative(const Operator& op);
// Increments the version of each tensor that the operator writes, so that autograd notices the write (no_derivative.cpp).
torch::CppFunction counting_versions(const Operator& op);

// Returns a boxed kernel: an object of class `Kernel`, which the dispatcher calls with the stack.
template <class Kernel, class... Arguments>
torch::CppFunction boxed(const Arguments&... arguments) {
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(arguments...));
}

// Returns true for a Python tensor subclass: the dispatcher calls its class before these kernels.
bool is_subclass(const Tensor& t);

// Returns true if volta_fa has sharding rules for the tensor's subclass. Only DTensor has: the first one loads them from Python.
bool has_rules(const Tensor& t);

}  // namespace volta_fa
