"""unsloth's training attention on volta_fa, for unsloth and unsloth_zoo 2026.10.9.

    import unsloth
    import volta_fa.unsloth  # before from_pretrained

    model, tokenizer = FastLanguageModel.from_pretrained(...)

Importing `volta_fa.unsloth` calls `enable_unsloth` (`switch`), which replaces attributes of unsloth's modules:

- `dispatch`: `unsloth.utils.attention_dispatch._run_attention`, the attention of unsloth's own models, dense and packed; and a flag of two
  model modules, by which Gemma 2 sends its attention there too.
- `gqa_sdpa`: `unsloth_zoo.temporary_patches.sdpa_gqa.make_gqa_sdpa`, the attention of Gemma 3 and Gemma 4.
- `sinks`: `unsloth_zoo.flex_attention.flex_attention_with_sink`, the attention of gpt-oss in training.

`releases` finds these by name and signature, and rejects an unsloth that has changed. unsloth's function runs what volta_fa does not:
`unsloth_stats` counts these calls by reason, and docs/guides/unsloth.md explains the reasons.
Importing this package imports nothing from unsloth."""

from .calls import unsloth_stats
from .switch import disable_unsloth, enable_unsloth

__all__ = ["disable_unsloth", "enable_unsloth", "unsloth_stats"]
