"""Hugging Face transformers models on volta_fa, for transformers 4.57 and 5.x.

    import volta_fa.transformers

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16, attn_implementation="volta_fa")

Importing this package registers an attention function and a mask function under the name `volta_fa`. It also replaces two
methods of `PreTrainedModel`, and functions in three modules of continuous batching, that know implementations by name.
Nothing falls back: a model without the attention interface raises ValueError when it is constructed with this name, and
the attention function raises NotImplementedError for options without a kernel. docs/guides/transformers.md lists both.

- `releases`: the installed transformers, and the names registered there.
- `mask_function`, with `mask_rule`: masks as windows, packed sequences and padding, without memory.
- `attention_function`: attention of a layer.
- `quantized_cache`: `QuantizedCache`, a KV cache in int8, int4 or fp8.
- `continuous_batching`: the attention of `generate_batch`.
- `sharded_sequences`: `context_parallel`, for sequences that are sharded over devices.
- `registration`: what importing this package does."""

from .releases import NAME  # isort: skip  # first: it says which transformers is needed, if none is installed
from .attention_function import attention
from .mask_function import mask
from .mask_rule import MaskRule
from .quantized_cache import QuantizedCache
from .registration import register
from .sharded_sequences import context_parallel

__all__ = ["NAME", "MaskRule", "QuantizedCache", "attention", "context_parallel", "mask"]

register()
