"""vLLM on volta_fa: an attention backend for an unpatched vLLM, chosen with `--attention-backend CUSTOM`.

vLLM calls `register` in each of its processes, by the entry point `volta_fa.vllm:register` in the group `vllm.general_plugins`.
It registers the backend as CUSTOM, and replaces nothing. Before that call nothing is imported from vLLM.
Nothing falls back: vLLM asks the backend what it supports, and reports an error for other models and options. docs/guides/vllm.md has the
commands and limits.

- `backend`: vLLM's abstract classes, implemented by `paged`: writing to the paged KV cache, and attention over it.
- `mla`: the same for models with latent attention (DeepSeek), registered instead with VOLTA_FA_VLLM_MLA=1; `expanded`: their long prompts.
- `spans`: images whose tokens see each other; `ranks`: GPUs that share the cached tokens of a KV head.
- `vision`: attention of vision encoders.

`paged`, `expanded`, `spans` and `ranks` do not import vLLM, so tests run them without it."""

from __future__ import annotations

import os
import warnings

import torch

from ...errors import bad_argument

__all__ = ["BACKEND", "MLA_BACKEND", "register"]

#: The classes for `--attention-backend CUSTOM`.
BACKEND = "volta_fa.integrations.vllm.backend.VoltaBackend"
MLA_BACKEND = "volta_fa.integrations.vllm.mla.VoltaMLABackend"
#: The class for `--attention-backend FLASH_ATTN_V100` of 1Cat-vLLM, a fork of vLLM for V100s.
V100_BACKEND = "volta_fa.integrations.vllm.backend.VoltaV100Backend"


def register() -> None:
    """Registers the backend as vLLM's CUSTOM. May be called any number of times.

    CUSTOM names one class. With VOLTA_FA_VLLM_MLA=1 in the environment that is the one for models with latent attention, else the one for
    all others.

    VOLTA_FA_VLLM_1CAT is for 1Cat-vLLM (docs/guides/1cat-vllm.md). With `backend`, this function also registers our backend under the name
    of 1Cat-vLLM's own, FLASH_ATTN_V100, by which it decides about features. With `package`, 1Cat-vLLM's own backend stays, and its package
    `flash_attn_v100` is replaced by volta_fa's functions.

    VOLTA_FA_VLLM_ANCHORED_WINDOW=ANCHORS:WINDOW, two numbers of tokens, limits layers with full attention to a sequence's first tokens
    and last ones.

    Adds `int8k_int4v` to the values of `--kv-cache-dtype`, where vLLM (0.33.0) lets plugins add some.

    VOLTA_FA_VLLM_VISION=1 makes vision encoders with `--mm-encoder-attn-backend TORCH_SDPA` run `volta_fa::fwd`.

    Raises ValueError for other values of the variables, or if `backend` meets a vLLM without FLASH_ATTN_V100. Warns, and registers nothing,
    if this vLLM has no registry."""
    from .paged import anchored_window

    mla = _variable("VOLTA_FA_VLLM_MLA", "0", "1")
    if anchored_window() is not None and mla == "1":
        raise bad_argument("VOLTA_FA_VLLM_ANCHORED_WINDOW", "a window", "none with VOLTA_FA_VLLM_MLA=1: unset one of the two")
    for_1cat = _variable("VOLTA_FA_VLLM_1CAT", "backend", "package")
    for_vision = _variable("VOLTA_FA_VLLM_VISION", "0", "1")
    if for_1cat == "package":
        from ..stand_in import provide_flash_attn_v100

        provide_flash_attn_v100()
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        # only a warning, because vLLM does not catch errors of plugins: no model could start
        warnings.warn(f"volta_fa: this vLLM has no registry of attention backends ({error}); nothing is registered", stacklevel=2)
        return
    register_backend(AttentionBackendEnum.CUSTOM, MLA_BACKEND if mla == "1" else BACKEND)
    if for_1cat == "backend":
        if not hasattr(AttentionBackendEnum, "FLASH_ATTN_V100"):
            raise bad_argument("VOLTA_FA_VLLM_1CAT", "`backend`", "1Cat-vLLM: this vLLM has no FLASH_ATTN_V100; unset the variable")
        register_backend(AttentionBackendEnum.FLASH_ATTN_V100, V100_BACKEND)
    if for_vision == "1":
        from . import vision

        vision.register()
    _register_cache_dtype()


def _register_cache_dtype() -> None:
    """Adds `paged.INT8K_INT4V` to the values of --kv-cache-dtype. Earlier releases of vLLM refuse it themselves."""
    try:
        from vllm.config.cache import is_known_kv_cache_dtype, register_kv_cache_dtype
        from vllm.v1.kv_cache_interface import KVQuantMode
    except ImportError:
        return
    from .paged import INT8K_INT4V

    class Handler:
        """Answers vLLM's questions about the format. As in int8, a token has scales beside its codes, so vLLM must move pages as it moves
        int8's. `paged.bytes_of_a_token` recognizes the format by both answers."""

        name = INT8K_INT4V

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> KVQuantMode:
            return KVQuantMode.INT8_PER_TOKEN_HEAD

    if not is_known_kv_cache_dtype(INT8K_INT4V):
        register_kv_cache_dtype(INT8K_INT4V)(Handler)


def _variable(name: str, *values: str) -> str:
    """Returns an environment variable. Raises ValueError unless it is empty or one of the values."""
    value = os.environ.get(name, "")
    if value not in ("", *values):
        raise bad_argument(name, f"`{value}`", " or ".join(values))
    return value
