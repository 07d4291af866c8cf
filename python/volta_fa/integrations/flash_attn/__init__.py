"""flash-attn 2.8 on volta_fa, for programs that call or import flash-attn.

- `interface`: flash-attn's functions, also in the package's own namespace.
- `install`: makes `import flash_attn` find volta_fa, in one process.
- `shim/`: the `flash_attn` package that it finds, and the metadata of its distribution.

`volta_fa.rotary` and `volta_fa.bert_padding` are the modules of flash-attn that need no kernel.
The functions raise NotImplementedError for options without a kernel. Nothing falls back.
"""
