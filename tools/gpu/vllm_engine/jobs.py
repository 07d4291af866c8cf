"""What runs: jobs of each vLLM version, and which results are compared. Import `jobs`, `COMPARISONS`, `CONTROLS`.

A job is one engine with one backend. Its keys:
- name, version; kind: tokens, encoder or load; model: a name of models.py; backend: a name for --attention-backend
- engine: arguments of `vllm.LLM`; env: environment variables; gpus: GPUs that it needs
- prompts: mixed, repeated or long (engine.py); lora: every other prompt uses the adapter; logprobs: False where vLLM has none
"""

from typing import Any

NEWEST = "0.33.0"
OURS, TRITON, FLASH = "CUSTOM", "TRITON_ATTN", "FLASH_ATTN"
_EAGER = {"enforce_eager": True}
_MLA = {"VOLTA_FA_VLLM_MLA": "1"}
_GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
#: 5,120 tokens of llama128; the prompts of `long` need 12,000 at their ends
_SMALL_CACHE = {"kv_cache_memory_bytes": 40 << 20, "disable_log_stats": False}

#: Results compared: the job, the job with the expected tokens, and what the pair shows.
COMPARISONS = [
    ("llama128-custom", "llama128-triton", "CUDA graphs, torch.compile, chunked prompts, prefix caching"),
    ("llama64-custom", "llama64-triton", "eager"),
    ("mistral-custom", "mistral-triton", "sliding window"),
    ("gemma2-custom", "gemma2-triton", "softcap, sliding window"),
    ("bloom-custom", "bloom-triton", "ALiBi"),
    ("gpt-oss-custom", "gpt-oss-triton", "sinks, sliding window"),
    ("lora-custom", "lora-triton", "LoRA in every other sequence"),
    ("deepseek-custom", "deepseek-triton", "MLA"),
    ("deepseek-graph-custom", "deepseek-triton", "MLA, CUDA graphs"),
    ("fp8-custom", "fp8-triton", "fp8 cache"),
    ("int8-custom", "int8-triton", "int8 cache"),
    ("ngram-custom", "repeated-custom", "speculation"),
    ("preempted-custom", "long-custom", "prefix caching under preemption"),
    ("volta-custom", "llama64-triton", "Volta's kernels"),
    ("two-gpus-custom", "two-gpus-triton", "tensor parallelism"),
]  # fmt: skip
#: vLLM's own backends against each other: their differences are rounding. Tolerances of COMPARISONS follow from these.
CONTROLS = [
    ("llama128-flash", "llama128-triton"),
    ("llama64-flash", "llama64-triton"),
    ("mistral-flash", "mistral-triton"),
    ("llama64-graph-triton", "llama64-triton"),
]


def job(name: str, model: str, backend: str, **options: Any) -> dict:
    """Returns a job of kind tokens, with defaults for missing options."""
    return {"name": name, "kind": "tokens", "model": model, "backend": backend, **options}


def pair(name: str, model: str, theirs: str = TRITON, env: dict | None = None, **options: Any) -> list[dict]:
    """Returns the same job for CUSTOM, with env, and for one of vLLM's backends."""
    return [job(f"{name}-custom", model, OURS, env=env or {}, **options), job(f"{name}-triton", model, theirs, **options)]


def jobs(version: str, flash_attention: bool) -> list[dict]:
    """Returns the jobs of a version, the most important first.

    Args:
        flash_attention: whether FlashAttention 3 is there.
    """
    found = [{"name": "load", "kind": "load", "model": "llama128", "backend": OURS}]
    found += pair("llama128", "llama128", env={"VOLTA_FA_LOG": "1"})
    found += pair("gpt-oss", "gpt-oss", engine=_EAGER)
    if flash_attention:
        found += [job("llama128-flash", "llama128", FLASH)]
        found += [job(f"{m}-flash", m, FLASH, engine=_EAGER) for m in ("llama64", "mistral")]  # its sinks need bf16
    found += [
        job("long-custom", "llama128", OURS, prompts="long", engine=_EAGER),
        job("preempted-custom", "llama128", OURS, prompts="long", engine=_EAGER | _SMALL_CACHE),
    ]
    found += pair("lora", "llama64", lora=True, engine=_EAGER | {"enable_lora": True, "max_lora_rank": 8})
    found += [{"name": f"encoder-{b}", "kind": "encoder", "model": "bert", "backend": n} for b, n in (("custom", OURS), ("triton", TRITON))]
    found += pair("llama64", "llama64", engine=_EAGER)
    found += pair("deepseek", "deepseek", "TRITON_MLA", env=_MLA, engine=_EAGER)
    found += pair("fp8", "llama128", engine=_EAGER | {"kv_cache_dtype": "fp8"})
    int8 = pair("int8", "llama128", engine=_EAGER | {"kv_cache_dtype": "int8_per_token_head"})
    if version == NEWEST:
        found += int8
        found += pair("mistral", "mistral", engine=_EAGER) + pair("gemma2", "gemma2", engine=_EAGER)
        found += pair("bloom", "bloom", engine=_EAGER)
        found += [
            job("deepseek-graph-custom", "deepseek", OURS, env=_MLA),
            job("ngram-custom", "llama128", OURS, prompts="repeated", logprobs=False, engine={"speculative_config": _GUESSES}),
            job("repeated-custom", "llama128", OURS, prompts="repeated", engine=_EAGER),
            job("volta-custom", "llama64", OURS, env={"VOLTA_FA_FAMILY": "volta"}, engine=_EAGER),
        ]
    else:
        found += [int8[0] | {"name": "int8-refused", "refused": "kv_cache_dtype not supported"}]
        found += [job("llama64-graph-triton", "llama64", TRITON)]
    found += pair("two-gpus", "llama64", gpus=2, engine=_EAGER | {"tensor_parallel_size": 2, "disable_custom_all_reduce": True})
    return [{"version": version, **j} for j in found]
