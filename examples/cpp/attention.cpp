// Calls volta_fa from C++ and compares out and gradients with attention from matrix products. Links against libtorch only;
// docs/guides/integrations.md has the g++ line.
//
//   attention /path/to/volta_fa/torch-2.11/libvolta_fa.so [module.pt]
//
// dlopen of the library registers the operators. `module.pt` is a TorchScript module that calls scaled_dot_product_attention
// (examples/export.py saves one). With the environment variable VOLTA_FA_ENABLE_SDPA=1 (`cpu` without a GPU), volta_fa runs
// these calls.

#include <dlfcn.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <cmath>
#include <iostream>

// Calls volta_fa::fwd by name through the dispatcher. Other arguments get the schema's defaults.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::fwd", "");
    torch::jit::Stack stack{q, k, v};
    for (size_t i = stack.size(); i < op.schema().arguments().size(); ++i) {
        const auto& argument = op.schema().arguments()[i];
        stack.push_back(argument.name() == "is_causal" ? c10::IValue(is_causal) : argument.default_value().value_or(c10::IValue()));
    }
    op.callBoxed(stack);
    return stack[0].toTensor();  // out, softmax_lse, rng_state
}

// Returns how many calls of scaled_dot_product_attention volta_fa has run in this process.
int64_t calls_of_sdpa() {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("volta_fa::_sdpa_stats", "");
    torch::jit::Stack stack;
    op.callBoxed(stack);
    return stack[0].toGenericDict().at("ran").toInt();
}

int main(int argc, char** argv) {
    if (argc < 2) {
        std::cerr << "usage: attention /path/to/libvolta_fa.so [module.pt]\n";
        return 2;
    }
    if (!dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
        std::cerr << dlerror() << '\n';
        return 1;
    }
    torch::manual_seed(0);
    const bool cuda = torch::cuda::is_available();
    const auto options = torch::dtype(cuda ? at::kHalf : at::kFloat).device(cuda ? at::kCUDA : at::kCPU).requires_grad(true);

    // (batch, seqlen, nheads, headdim); two query heads for each head of k and v
    const auto q = torch::randn({2, 9, 4, 16}, options);
    const auto k = torch::randn({2, 9, 2, 16}, options);
    const auto v = torch::randn({2, 9, 2, 16}, options);
    const auto out = attention(q, k, v, /*is_causal=*/true);
    const auto found = torch::autograd::grad({out.pow(2).sum()}, {q, k, v});

    // the same attention from matrix products and a softmax
    const auto by_head = [](const at::Tensor& t) { return t.transpose(1, 2).repeat_interleave(4 / t.size(2), 1); };
    const auto hidden = torch::ones({9, 9}, options.dtype(at::kBool).requires_grad(false)).triu(1);
    const auto scores = (by_head(q).matmul(by_head(k).transpose(2, 3)) / std::sqrt(16.0)).masked_fill(hidden, -INFINITY);
    const auto expected_out = scores.softmax(-1).matmul(by_head(v)).transpose(1, 2);
    const auto expected = torch::autograd::grad({expected_out.pow(2).sum()}, {q, k, v});

    const double tolerance = cuda ? 2e-2 : 1e-4;
    if (!out.allclose(expected_out, tolerance, tolerance)) return std::cerr << "out differs\n", 1;
    for (size_t i = 0; i < found.size(); ++i) {
        if (!found[i].allclose(expected[i], tolerance, tolerance)) return std::cerr << "gradient " << i << " differs\n", 1;
    }
    std::cout << "out and gradients agree\n";

    if (argc > 2) {
        auto module = torch::jit::load(argv[2]);
        if (cuda) module.to(at::kCUDA, at::kHalf);
        // (batch, tokens, columns); export.py's module has 64 columns
        const auto result = module.forward({torch::randn({2, 9, 64}, options.requires_grad(false))}).toTensor();
        result.sum().backward();
        for (const auto& p : module.parameters()) {
            if (!p.grad().defined()) return std::cerr << "a parameter has no gradient\n", 1;
        }
        std::cout << "module: " << result.size(0) << ' ' << result.size(1) << ' ' << result.size(2) << '\n';
        std::cout << "calls of scaled_dot_product_attention run by volta_fa: " << calls_of_sdpa() << '\n';
    }
}
