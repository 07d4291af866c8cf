"""vLLM on volta_fa: an attention backend for an unpatched vLLM, chosen with `--attention-backend CUSTOM`.

vLLM calls `register` in each of its processes, by the entry point `volta_fa.vllm:register` in the group `vllm.general_plugins`.
It registers the backend as CUSTOM, and replaces nothing. Before that call nothing is imported from vLLM.
Nothing falls back: vLLM asks the backend what it supports, and reports an error for other models and options. docs/guides/vllm.md has the
commands and limits.

- `paged`: the paged cache and the calls of the operators, without vLLM.
- `backend`: vLLM's abstract classes on `paged`.
- `mla`: the same for models with latent attention (DeepSeek), registered instead with VOLTA_FA_VLLM_MLA=1.
"""

from __future__ import annotations

import os
import warnings

from ...errors import bad_argument

__all__ = ["BACKEND", "MLA_BACKEND", "register"]

#: The classes for `--attention-backend CUSTOM`.
BACKEND = "volta_fa.integrations.vllm.backend.VoltaBackend"
MLA_BACKEND = "volta_fa.integrations.vllm.mla.VoltaMLABackend"


def register() -> None:
    """Registers the backend as vLLM's CUSTOM. May be called any number of times.

    CUSTOM names one class, and vLLM needs one with latent attention for models that have it and one without for others. With
    VOLTA_FA_VLLM_MLA=1 in the environment, this function registers the former.

    Raises ValueError if VOLTA_FA_VLLM_MLA is neither 0 nor 1. Warns, and registers nothing, if this vLLM has no registry.
    """
    mla = os.environ.get("VOLTA_FA_VLLM_MLA", "")
    if mla not in ("", "0", "1"):
        raise bad_argument("VOLTA_FA_VLLM_MLA", f"`{mla}`", "0 or 1")
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        # vLLM does not catch errors of plugins: this one would keep every model from starting
        warnings.warn(f"volta_fa: this vLLM has no registry of attention backends ({error}); nothing is registered", stacklevel=2)
        return
    register_backend(AttentionBackendEnum.CUSTOM, MLA_BACKEND if mla == "1" else BACKEND)
