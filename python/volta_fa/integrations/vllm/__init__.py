"""vLLM on volta_fa: an attention backend for a stock vLLM, chosen with `vllm serve --attention-backend CUSTOM`.

vLLM calls `register` in all of its processes, by the entry point of this distribution in the group `vllm.general_plugins`. Nothing is
imported from vLLM before. docs/guides/vllm.md has the releases, the commands and what has not run.

- `paged`: the cache and the calls of the operator, in PyTorch alone.
- `backend`: vLLM's abstract classes on them.
- `mla`: the same for models with latent attention (DeepSeek), chosen instead with VOLTA_FA_VLLM_MLA=1.
"""

from __future__ import annotations

import os
import warnings

from ...errors import bad_argument

__all__ = ["BACKEND", "MLA_BACKEND", "register"]

#: What `--attention-backend CUSTOM` stands for.
BACKEND = "volta_fa.integrations.vllm.backend.VoltaBackend"
MLA_BACKEND = "volta_fa.integrations.vllm.mla.VoltaMLABackend"


def register() -> None:
    """Tell vLLM what CUSTOM stands for. May be called any number of times; no other choice of vLLM's changes.

    One name has one class, and vLLM refuses a class without latent attention for models that have it, and the other way round:
    VOLTA_FA_VLLM_MLA=1 in the environment, read here, makes it that for latent attention. Raises ValueError for other values than 0
    and 1.
    """
    mla = os.environ.get("VOLTA_FA_VLLM_MLA", "")
    if mla not in ("", "0", "1"):
        raise bad_argument("VOLTA_FA_VLLM_MLA", f"`{mla}`", "0 or 1")
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        # vLLM does not catch what plugins raise: without this, no model would start in an environment that has both
        warnings.warn(f"volta_fa: this vLLM has no registry of attention backends ({error}); nothing is registered", stacklevel=2)
        return
    register_backend(AttentionBackendEnum.CUSTOM, MLA_BACKEND if mla == "1" else BACKEND)
