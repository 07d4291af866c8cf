"""Models of diffusers' own classes with random weights, which run_diffusers.py and fast_models.py run with volta_fa
and with PyTorch's attention: SMALL, and LARGE with released widths.

Functions such as flux() take the sizes of a model and its input, and return arguments of Model:
- tokens, text: numbers of image tokens and of text tokens; side: the edge of a square input
- width: columns of the text's embeddings; but in wan() and ltx(), with `frames` and `height`, the width of the latents
- axes: columns of a head for each rotary axis; dual: SD3's layers with a second attention, of image tokens alone
- channels, heads, blocks (of transformers) of sdxl() and vae(): an entry for each level of the model"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

warnings.simplefilter("ignore")

import diffusers
import torch


@dataclass(frozen=True)
class Model:
    """A model and its inputs. The first input gets a gradient. Each call of `make` and `inputs` draws random values."""

    name: str
    make: Callable[[], torch.nn.Module]
    inputs: Callable[[], dict[str, Any]]
    dispatches: bool = True  # whether `set_attention_backend` reaches all its attention; else diffusers' older switches do
    has_mask: bool = False  # whether it gives its attention a mask
    parallel: bool = False  # whether diffusers has a plan for its context parallelism


def flux(heads: int, headdim: int, layers: int, tokens: int, text: int, axes: tuple[int, ...], width: int) -> dict[str, Any]:
    side = int(tokens**0.5)

    def ids() -> torch.Tensor:
        return torch.cartesian_prod(torch.zeros(1), *[torch.arange(side, dtype=torch.float32)] * 2)

    return dict(
        make=lambda: diffusers.FluxTransformer2DModel(
            in_channels=16, num_layers=layers, num_single_layers=2 * layers, attention_head_dim=headdim, num_attention_heads=heads,
            joint_attention_dim=width, pooled_projection_dim=width, axes_dims_rope=axes,
        ),
        inputs=lambda: dict(
            hidden_states=torch.randn(1, tokens, 16), encoder_hidden_states=torch.randn(1, text, width),
            pooled_projections=torch.randn(1, width), timestep=torch.tensor([0.5]), img_ids=ids(), txt_ids=torch.zeros(text, 3),
        ),
        parallel=True,
    )  # fmt: skip


def sd3(heads: int, headdim: int, layers: int, side: int, text: int, width: int, dual: tuple[int, ...]) -> dict[str, Any]:
    return dict(
        make=lambda: diffusers.SD3Transformer2DModel(
            sample_size=side, patch_size=2, in_channels=4, num_layers=layers, attention_head_dim=headdim, num_attention_heads=heads,
            joint_attention_dim=width, caption_projection_dim=heads * headdim, pooled_projection_dim=width, out_channels=4,
            pos_embed_max_size=max(side // 2, 8), dual_attention_layers=dual, qk_norm="rms_norm",
        ),
        inputs=lambda: dict(
            hidden_states=torch.randn(2, 4, side, side), encoder_hidden_states=torch.randn(2, text, width),
            pooled_projections=torch.randn(2, width), timestep=torch.tensor([500.0, 500.0]),
        ),
        dispatches=False,
    )  # fmt: skip


def wan(heads: int, headdim: int, layers: int, frames: int, height: int, width: int, text: int) -> dict[str, Any]:
    return dict(
        make=lambda: diffusers.WanTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=headdim, in_channels=4, out_channels=4, text_dim=64,
            ffn_dim=2 * heads * headdim, num_layers=layers,
        ),
        inputs=lambda: dict(
            hidden_states=torch.randn(1, 4, frames, height, width), timestep=torch.tensor([500]),
            encoder_hidden_states=torch.randn(1, text, 64),
        ),
        parallel=True,
    )  # fmt: skip


def qwen_image(heads: int, headdim: int, layers: int, side: int, text: int, axes: tuple[int, ...], width: int) -> dict[str, Any]:
    return dict(
        make=lambda: diffusers.QwenImageTransformer2DModel(
            in_channels=16, out_channels=4, num_layers=layers, attention_head_dim=headdim, num_attention_heads=heads,
            joint_attention_dim=width, axes_dims_rope=axes,
        ),
        inputs=lambda: dict(
            hidden_states=torch.randn(1, side**2, 16), encoder_hidden_states=torch.randn(1, text, width),
            encoder_hidden_states_mask=torch.ones(1, text, dtype=torch.bool), timestep=torch.tensor([0.5]), img_shapes=[[(1, side, side)]],
        ),
        has_mask=True,
    )  # fmt: skip


def ltx(heads: int, headdim: int, layers: int, frames: int, height: int, width: int, text: int) -> dict[str, Any]:
    return dict(
        make=lambda: diffusers.LTXVideoTransformer3DModel(
            in_channels=16, out_channels=16, num_attention_heads=heads, attention_head_dim=headdim, num_layers=layers,
            cross_attention_dim=heads * headdim, caption_channels=64,
        ),
        inputs=lambda: dict(
            hidden_states=torch.randn(1, frames * height * width, 16), encoder_hidden_states=torch.randn(1, text, 64),
            timestep=torch.tensor([500]), encoder_attention_mask=(torch.arange(text) < text - 3)[None],
            num_frames=frames, height=height, width=width,
        ),
        has_mask=True,
    )  # fmt: skip


def sdxl(channels: tuple[int, ...], heads: tuple[int, ...], blocks: tuple[int, ...], side: int, width: int) -> dict[str, Any]:
    kinds = ["DownBlock2D"] + ["CrossAttnDownBlock2D"] * (len(channels) - 1)
    return dict(
        make=lambda: diffusers.UNet2DConditionModel(
            sample_size=side, block_out_channels=channels, layers_per_block=2, down_block_types=kinds,
            up_block_types=[kind.replace("Down", "Up") for kind in reversed(kinds)], attention_head_dim=heads, cross_attention_dim=width,
            transformer_layers_per_block=blocks, use_linear_projection=True, addition_embed_type="text_time",
            addition_time_embed_dim=8, projection_class_embeddings_input_dim=80,
        ),
        inputs=lambda: dict(
            sample=torch.randn(2, 4, side, side), timestep=torch.tensor([500.0, 500.0]), encoder_hidden_states=torch.randn(2, 77, width),
            added_cond_kwargs=dict(text_embeds=torch.randn(2, 32), time_ids=torch.ones(2, 6)),
        ),
        dispatches=False,
    )  # fmt: skip


def vae(channels: tuple[int, ...], side: int) -> dict[str, Any]:
    return dict(
        make=lambda: diffusers.AutoencoderKL(
            block_out_channels=channels, down_block_types=["DownEncoderBlock2D"] * len(channels), norm_num_groups=16,
            up_block_types=["UpDecoderBlock2D"] * len(channels), layers_per_block=1, latent_channels=4, shift_factor=0.0,
        ),
        inputs=lambda: dict(sample=torch.randn(1, 3, side, side)),
        dispatches=False,
    )  # fmt: skip


SMALL = [
    Model("flux", **flux(heads=2, headdim=16, layers=1, tokens=16, text=8, axes=(4, 4, 8), width=32)),
    Model("sd3", **sd3(heads=2, headdim=32, layers=2, side=8, text=10, width=32, dual=(0,))),
    Model("sdxl-unet", **sdxl(channels=(32, 64), heads=(2, 4), blocks=(1, 2), side=16, width=64)),
    Model("wan", **wan(heads=2, headdim=24, layers=2, frames=3, height=8, width=8, text=12)),
    Model("qwen-image", **qwen_image(heads=2, headdim=32, layers=2, side=8, text=10, axes=(8, 12, 12), width=48)),
    Model("ltx", **ltx(heads=2, headdim=32, layers=2, frames=2, height=6, width=6, text=12)),
    Model("vae", **vae(channels=(32, 64), side=16)),
    Model("vae-512", **vae(channels=(32, 512), side=16)),
]
#: The width and length of the released models, with fewer layers: SDXL at 1024 x 1024 (all layers), FLUX.1, SD 3.5 medium, Wan 2.1 of
#: 1.3 billion weights with 5 frames of latents of 480 x 832, Qwen-Image at 1024 x 1024, LTX-Video with 5 frames of latents of 512 x 768,
#: SDXL's VAE at 512 x 512.
LARGE = [
    Model("sdxl-unet", **sdxl(channels=(320, 640, 1280), heads=(5, 10, 20), blocks=(1, 2, 10), side=128, width=2048)),
    Model("flux", **flux(heads=24, headdim=128, layers=2, tokens=4096, text=512, axes=(16, 56, 56), width=4096)),
    Model("sd3", **sd3(heads=24, headdim=64, layers=4, side=128, text=333, width=4096, dual=(0, 1))),
    Model("wan", **wan(heads=12, headdim=128, layers=4, frames=5, height=60, width=104, text=512)),
    Model("qwen-image", **qwen_image(heads=24, headdim=128, layers=2, side=64, text=512, axes=(16, 56, 56), width=3584)),
    Model("ltx", **ltx(heads=32, headdim=64, layers=4, frames=5, height=16, width=24, text=128)),
    Model("vae-512", **vae(channels=(128, 256, 512, 512), side=512)),
]


def build(model: Model, device: str, seed: int = 0) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Returns the module and its inputs, in float32."""
    torch.manual_seed(seed)
    with torch.device(device):
        return model.make().eval(), model.inputs()


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Returns the value with its floating-point tensors, in dictionaries too, in this dtype."""
    if isinstance(value, dict):
        return {name: cast(item, dtype) for name, item in value.items()}
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def forward(module: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return module(**inputs, return_dict=False)[0]


def forward_backward(module: torch.nn.Module, inputs: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and the gradient of the first input."""
    inputs = cast(inputs, dtype)
    if "timestep" in inputs and inputs["timestep"].is_floating_point():  # a number, not an activation: float32 in each dtype
        inputs["timestep"] = inputs["timestep"].float()
    first = next(iter(inputs))
    inputs[first] = inputs[first].requires_grad_()
    out = forward(module, inputs)
    generator = torch.Generator(out.device).manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32)
    (gradient,) = torch.autograd.grad(out, inputs[first], dout.to(out.dtype))
    return out.detach().double(), gradient.double()
