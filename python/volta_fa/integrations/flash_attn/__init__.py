"""flash-attn on volta_fa, for programs that call or import flash-attn: the interface of release 2.8.3.

- `interface`: flash-attn's functions, which `volta_fa` exports. They are plain functions and register no `flash_attn::` operators.
- `fa3`: FlashAttention 3's functions, of its top-level module `flash_attn_interface`.
- `attention_chunk`: its chunked local attention, as packed sequences.
- `compiled`, `private`: flash-attn's compiled module and private functions. `mha`, `norms`, `cross_entropy`: its torch.nn modules.
- `v100`, `turing`: the functions of `flash_attn_v100` and `flash_attn_turing`, packages of other authors for these GPUs.
- `shim/`: a `flash_attn` package made of volta_fa, and the metadata of its distribution. `volta_fa.install_flash_attn_shim()` appends
  it to sys.path, so that `import flash_attn` finds it in this process, and tools/flash_attn_shim installs it with pip.

`volta_fa.rotary` and `volta_fa.bert_padding` are further modules that need no kernel.
Nothing falls back: the functions raise ValueError or NotImplementedError. docs/guides/flash-attn.md lists the differences."""
