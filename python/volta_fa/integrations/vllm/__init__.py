"""vLLM on volta_fa: an attention backend for an unpatched vLLM, chosen with `--attention-backend CUSTOM`.

vLLM calls `register` in each of its processes, by the entry point `volta_fa.vllm:register` in the group `vllm.general_plugins`.
It registers the backend as CUSTOM, and replaces nothing. Before that call nothing is imported from vLLM.
Nothing falls back: vLLM asks the backend what it supports, and reports an error for other models and options. docs/guides/vllm.md has the
commands and limits.

- `paged`: the paged cache and the calls of the operators, without vLLM.
- `backend`: vLLM's abstract classes on `paged`.
- `mla`: the same for models with latent attention (DeepSeek), registered instead with VOLTA_FA_VLLM_MLA=1.
- `expanded`: attention of their long prompts, without vLLM.
- `vision`: attention of vision encoders.
"""

from __future__ import annotations

import os
import warnings

from ...errors import bad_argument

__all__ = ["BACKEND", "MLA_BACKEND", "register"]

#: The classes for `--attention-backend CUSTOM`.
BACKEND = "volta_fa.integrations.vllm.backend.VoltaBackend"
MLA_BACKEND = "volta_fa.integrations.vllm.mla.VoltaMLABackend"
#: The class for 1Cat-vLLM's `--attention-backend FLASH_ATTN_V100`.
V100_BACKEND = "volta_fa.integrations.vllm.backend.VoltaV100Backend"


def register() -> None:
    """Registers the backend as vLLM's CUSTOM. May be called any number of times.

    CUSTOM names one class, and vLLM needs one with latent attention for models that have it and one without for others. With
    VOLTA_FA_VLLM_MLA=1 in the environment, this function registers the former.

    VOLTA_FA_VLLM_1CAT is for 1Cat-vLLM (docs/guides/1cat-vllm.md). `backend` also registers the backend under the name FLASH_ATTN_V100, by
    which its policies go. `package` leaves that backend, and gives it volta_fa's functions as its package `flash_attn_v100`.

    VOLTA_FA_VLLM_VISION=1 makes vision encoders with `--mm-encoder-attn-backend TORCH_SDPA` run `volta_fa::fwd`.

    Raises ValueError for other values of the variables, or if `backend` meets a vLLM without FLASH_ATTN_V100. Warns, and registers nothing,
    if this vLLM has no registry.
    """
    mla = _variable("VOLTA_FA_VLLM_MLA", "0", "1")
    for_1cat = _variable("VOLTA_FA_VLLM_1CAT", "backend", "package")
    for_vision = _variable("VOLTA_FA_VLLM_VISION", "0", "1")
    if for_1cat == "package":
        from ..stand_in import provide_flash_attn_v100

        provide_flash_attn_v100()
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        # vLLM does not catch errors of plugins: this one would keep every model from starting
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


def _variable(name: str, *values: str) -> str:
    """Returns an environment variable. Raises ValueError unless it is empty or one of the values."""
    value = os.environ.get(name, "")
    if value not in ("", *values):
        raise bad_argument(name, f"`{value}`", " or ".join(values))
    return value
