"""A training step as a CUDA graph: captured once, replayed with other data, without a launch from Python.

    python examples/cuda_graph.py            (in a checkout: PYTHONPATH=python .venv/bin/python examples/cuda_graph.py)

A capture needs a GPU. Without one the program says so, runs the same step eagerly on the CPU, and exits with 0.
"""

import torch
import torch.nn.functional as F

import volta_fa  # noqa: F401  registers the op


def step(q, k, v, dout):
    """Forward and backward: everything that a capture records."""
    out = torch.ops.volta_fa.fwd(q, k, v, is_causal=True)[0]
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def reference(q, k, v, dout):
    by_head = [t.detach().float().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*by_head, is_causal=True)
    gradients = torch.autograd.grad(out, by_head, dout.float().transpose(1, 2))
    return [t.detach().transpose(1, 2) for t in (out, *gradients)]


def check(found, inputs):
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if inputs[0].is_cuda else {"rtol": 1e-4, "atol": 1e-5}
    for a, b in zip(found, reference(*inputs), strict=True):
        torch.testing.assert_close(a.float(), b, **tolerance)


def capture(inputs):
    """The graph, and the tensors that each replay fills."""
    # Kernels are loaded and memory is reserved at the first run: that must happen before the capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*inputs)
    return graph, results


def main():
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.float16) if cuda else ("cpu", torch.float32)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 100, 4, 64, device=device, dtype=dtype, requires_grad=i < 3) for i in range(4)]
    if cuda:
        graph, results = capture(inputs)
    else:
        print("CUDA graphs need a GPU, and there is none: running the step eagerly on the CPU")
    for _ in range(3):
        with torch.no_grad():
            for t in inputs:
                t.copy_(torch.randn_like(t))  # a graph reads the tensors that it was captured with
        if cuda:
            graph.replay()
        else:
            results = step(*inputs)
        check(results, inputs)
    print("3 replays agree with PyTorch's attention" if cuda else "3 eager steps agree with PyTorch's attention")


if __name__ == "__main__":
    main()
