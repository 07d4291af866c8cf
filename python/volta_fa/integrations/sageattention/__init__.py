"""SageAttention 2's functions on volta_fa::fwd_fast: `interface`, and the package `sageattention` for programs that import it: `install`.

Arguments are SageAttention's. What it ignores is applied or refused here: masks, unknown keywords, products in fp8.
"""
