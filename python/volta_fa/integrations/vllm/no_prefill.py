"""Defines an MLA prefill backend that computes nothing, for vLLM 0.26 and later (checked with 0.26 and 0.33).

From 0.26 on, vLLM's MLA layer builds a second attention backend for prompts. On Volta and Turing it would choose FlashAttention, which
does not run there. `mla.VoltaMLAImpl.forward_mha` computes prompts itself, and calls no method of the backend here.
"""

from __future__ import annotations

from typing import Any

from ...errors import bad_argument

__all__ = ["select"]

_PATH = f"{__name__}.NoPrefill"


def select() -> None:
    """Makes `NoPrefill` the prefill backend of the model that vLLM builds, unless `mla_prefill_backend` names one.

    Does nothing in releases without such backends, or while vLLM has no current config.
    """
    try:
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    except ImportError:
        return
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and config.attention_config.mla_prefill_backend is None:
        register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, _PATH)
        config.attention_config.mla_prefill_backend = MLAPrefillBackendEnum.CUSTOM


def __getattr__(name: str) -> Any:
    """Defines `NoPrefill` on first use, because releases before 0.26 have no base class for it."""
    if name != "NoPrefill":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

    class NoPrefill(MLAPrefillBackend):
        """Supports all models, and computes nothing."""

        @staticmethod
        def get_name() -> str:
            """Returns the registered name."""
            return "CUSTOM"

        @classmethod
        def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
            """Returns no reasons against any model: the attention backend checks its own."""
            return []

        def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
            """Raises NotImplementedError: `VoltaMLAImpl.forward_mha` computes prompts."""
            raise bad_argument("run_prefill_new_tokens", "a call", "none: forward_mha computes prompts", error=NotImplementedError)

        run_prefill_context_chunk = run_prefill_new_tokens

    globals()["NoPrefill"] = NoPrefill
    return NoPrefill
