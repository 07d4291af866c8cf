"""How other programs run their attention on volta_fa: one module or package for each program.

Module | Program | Takes effect by
---|---|---
`sdpa` | PyTorch's `scaled_dot_product_attention` | `volta_fa.enable_sdpa()`
`torch_flash_impl` | PyTorch's registry of flash attention implementations | `activate_flash_attention_impl("VOLTA")`
`dtensor` | PyTorch's DTensor and `context_parallel` | `import volta_fa`
`xformers` | programs that call xformers' `memory_efficient_attention` | `volta_fa.enable_xformers()`
`flash_attn` | programs that call or import flash-attn 2 | a call of its functions, `volta_fa.install_flash_attn_shim()`
`sageattention` | programs that import SageAttention | `volta_fa.install_sageattention_shim()`
`volta_fa.flash_mla` | programs that call FlashMLA | a call of its functions
`transformers` | Hugging Face transformers | `import volta_fa.transformers`, `attn_implementation="volta_fa"`
`unsloth` | unsloth | `import volta_fa.unsloth`, `volta_fa.enable_unsloth()`
`vllm` | vLLM | its plugin entry point, `--attention-backend CUSTOM`

Each module begins with the supported releases, what it registers or replaces, and what falls back.
PyTorch's FlexAttention is in `volta_fa.flex`: `volta_fa.enable_flex()`. The ComfyUI node is in the repository's integrations/comfyui.

Importing this package imports none of these programs."""
