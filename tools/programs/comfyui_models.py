"""ComfyUI's own models with random weights, and its KSampler, for run_comfyui.py: of real width on a GPU, small on the CPU.

A model's name is a key of CONFIGS, with "-small" for the CPU's sizes on any device, or with "-mask" for an attention mask. ComfyUI is
imported in the functions, because its arguments must be parsed before."""

from __future__ import annotations

from collections import namedtuple

# Options of ComfyUI's model classes: those of the released models, and sizes by device.
SDXL = dict(
    use_checkpoint=False, image_size=32, out_channels=4, in_channels=4, use_spatial_transformer=True, legacy=False,
    num_classes="sequential", adm_in_channels=2816, use_linear_in_transformer=True, use_temporal_attention=False,
    use_temporal_resblock=False,
)  # fmt: skip
SDXL_SIZES = {
    "cuda": dict(
        model_channels=320, channel_mult=[1, 2, 4], num_res_blocks=[2, 2, 2], transformer_depth=[0, 0, 2, 2, 10, 10],
        transformer_depth_middle=10, transformer_depth_output=[0, 0, 0, 2, 2, 2, 10, 10, 10], context_dim=2048,
    ),
    "cpu": dict(
        model_channels=64, channel_mult=[1, 2], num_res_blocks=[1, 1], transformer_depth=[0, 1], transformer_depth_middle=1,
        transformer_depth_output=[0, 0, 1, 1], context_dim=64,
    ),
}  # fmt: skip
FLUX = dict(
    image_model="flux", in_channels=16, out_channels=16, mlp_ratio=4.0, axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True,
    guidance_embed=True, txt_ids_dims=[],
)  # fmt: skip
FLUX_SIZES = {
    "cuda": dict(hidden_size=3072, num_heads=24, depth=19, depth_single_blocks=38, context_in_dim=4096, vec_in_dim=768),
    "cpu": dict(hidden_size=256, num_heads=2, depth=1, depth_single_blocks=1, context_in_dim=64, vec_in_dim=64),
}
QWEN = dict(image_model="qwen_image", in_channels=64, out_channels=16)
QWEN_SIZES = {
    "cuda": dict(num_layers=20, num_attention_heads=24, joint_attention_dim=3584),  # of 60 layers: in fp64 all would take 160 GB
    "cpu": dict(num_layers=1, num_attention_heads=2, joint_attention_dim=64),
}
#: By kind of model: ComfyUI's class, its options, and those of each size.
CONFIGS = {"sdxl": ("SDXL", SDXL, SDXL_SIZES), "flux": ("Flux", FLUX, FLUX_SIZES), "qwen": ("QwenImage", QWEN, QWEN_SIZES)}
#: What KSampler computes: the edge of the latent (an eighth of the image's), the number of text tokens, and that of steps.
Problem = namedtuple("Problem", "edge tokens steps")
PROBLEMS = {
    "cuda": {"sdxl": Problem(128, 77, 4), "flux": Problem(128, 512, 2), "qwen": Problem(128, 512, 2)},
    "cpu": {"sdxl": Problem(16, 77, 2), "flux": Problem(16, 24, 2), "qwen": Problem(16, 24, 2)},
}


def size_of(name, device):
    """Returns the key of a model's sizes and problem: that of the CPU for a name with "-small", else the device."""
    return "cpu" if name.endswith("-small") else device


def problem_of(name, device):
    """Returns the problem of a model's name on a device."""
    return PROBLEMS[size_of(name, device)][name.split("-")[0]]


def build(name, dtype, device):
    """Returns a model of ComfyUI in a ModelPatcher. Its random weights are the same in each dtype, but for rounding."""
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models

    class_name, options, sizes = CONFIGS[name.split("-")[0]]
    config = getattr(comfy.supported_models, class_name)({**options, **sizes[size_of(name, device)]})
    config.set_inference_dtype(dtype, None)
    place = comfy.model_management.get_torch_device()
    model = config.get_model({}, device=place)
    randomize(model.diffusion_model, device)
    model.to(place)
    return comfy.model_patcher.ModelPatcher(model, load_device=place, offload_device=place)


def randomize(module, device):
    """Gives matrices random values that fp16 can represent, so that attention scores spread over a few units; norms 1, biases 0.

    Each residual branch of a UNet adds little (a gain of 0.25). Otherwise a deep random UNet is chaotic: any two computations in fp16
    differ completely."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    for name, weight in module.named_parameters():
        if weight.ndim < 2:  # of a norm, or a bias
            value = torch.full_like(weight, float(name.endswith(("weight", "scale"))))
        else:
            fan_in = weight[0].numel()
            scores = name.endswith(("to_q.weight", "to_k.weight"))
            last_of_branch = name.endswith(("to_out.0.weight", "ff.net.2.weight", "out_layers.3.weight", "proj_out.weight"))
            gain = 2.0 if scores else 0.25 if last_of_branch else 1.0
            value = torch.randn(weight.shape, generator=generator, device=device, dtype=torch.float16) * (gain * fan_in**-0.5)
        weight.data.copy_(value)


def sample(patcher, name, device, steps):
    """Returns the latents that ComfyUI's KSampler makes in this number of steps. `patcher`: what `build` returned for this name."""
    import comfy.sample
    import torch

    kind = name.split("-")[0]
    edge, tokens, _ = problem_of(name, device)
    generator = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    _, _, all_sizes = CONFIGS[kind]
    sizes = all_sizes[size_of(name, device)]
    width = sizes[{"sdxl": "context_dim", "flux": "context_in_dim", "qwen": "joint_attention_dim"}[kind]]  # of the text's embedding
    options = {"pooled_output": randn(1, sizes["vec_in_dim"] if kind == "flux" else 1280)}  # 1280: SDXL's
    if name == "flux-mask":  # as a style model sets it: an additive mask over text and image tokens
        total = tokens + (edge // 2) ** 2
        mask = torch.zeros(1, total, total)
        mask[:, tokens:, :tokens] = -1.5
        mask[:, :, 3:7] = -torch.inf
        options |= {"attention_mask": mask, "attention_mask_img_shape": (edge // 2, edge // 2)}
    positive, negative = [[randn(1, tokens, width), dict(options)]], [[randn(1, tokens, width), dict(options)]]
    shape = {"sdxl": (1, 4, edge, edge), "flux": (1, 16, edge, edge), "qwen": (1, 16, 1, edge, edge)}[kind]  # qwen: one frame
    noise, latent = randn(*shape), torch.zeros(*shape)
    cfg, scheduler = (5.0, "normal") if kind == "sdxl" else (1.0, "simple")  # cfg: the scale of guidance
    return comfy.sample.sample(
        patcher, noise, steps, cfg, "euler", scheduler, positive, negative, latent, disable_pbar=True, seed=1
    ).float()
