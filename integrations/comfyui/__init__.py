"""ComfyUI nodes that run attention on volta_fa. docs/guides/comfyui.md explains them.

Without a usable volta_fa, ComfyUI starts as usual: one message says why, and no node is registered.
"""

import logging
import sys

NODE_CLASS_MAPPINGS: dict[str, type] = {}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}

try:
    import volta_fa  # noqa: F401
except ImportError as error:
    missing = isinstance(error, ModuleNotFoundError) and error.name == "volta_fa"
    reason = f"volta_fa is not installed in {sys.executable}: install its wheel there with pip" if missing else str(error)
    logging.error("volta_fa: no nodes, because %s", reason)
else:
    from .node import VoltaAttention, enable_default_attention

    NODE_CLASS_MAPPINGS["VoltaAttention"] = VoltaAttention
    NODE_DISPLAY_NAME_MAPPINGS["VoltaAttention"] = "volta_fa Attention"
    enable_default_attention()  # for models without the node: PyTorch's attention, and xformers' if ComfyUI imported it
