"""The jobs of each vLLM version, which run.py runs (`jobs`), and the pairs of jobs whose results compare.py compares (`COMPARISONS`).

A job is one engine with one backend. Its keys:
- name, version; model: a name of models.py; backend: a name for --attention-backend
- kind: tokens (generates from prompts), encoder (embeds them), server (tokens by HTTP) or load (many requests to a server)
- engine: arguments of `vllm.LLM`; env: environment variables (VOLTA_FA_LOG prints volta_fa's kernels); gpus: GPUs that it needs
- prompts: mixed, repeated, long, longer or images (engine.py)
- of kinds load and server: serve, arguments of `vllm serve`; cache_bytes, its KV cache
- lora: every other prompt uses the adapter; logprobs: False where vLLM has none
- refused: part of the error with which vLLM must refuse the job"""

from typing import Any

NEWEST = "0.33.0"
#: 1Cat-vLLM, a fork for V100s, whose Python sources run on the stock wheel of FORK_BASE.
FORK, FORK_BASE = "1.3.0", "0.21.0"
#: Attention backends: volta_fa's plugin is vLLM's CUSTOM. Names of jobs end with custom, triton or flash.
OURS, TRITON, FLASH = "CUSTOM", "TRITON_ATTN", "FLASH_ATTN"
#: vLLM's counters that jobs with statistics ("disable_log_stats": False) report.
ACCEPTED = "spec_decode_num_accepted_tokens"
COUNTS = ("num_preemptions", "spec_decode_num_draft_tokens", ACCEPTED)
_EAGER = {"enforce_eager": True}
#: CUSTOM then names volta_fa's backend for latent attention (MLA).
_MLA = {"VOLTA_FA_VLLM_MLA": "1"}
#: Speculation: by words that the text repeats (_GUESSES), and by the model's own draft head (_MTP).
_GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}, "disable_log_stats": False}
#: 40 MiB are 5,120 tokens of llama128. The prompts of `long` need 12,000 at their ends, so vLLM preempts.
_SMALL_CACHE = {"kv_cache_memory_bytes": 40 << 20, "disable_log_stats": False}
#: Options of models with linear attention: vLLM's own implementation of it, because the others need packages.
_HYBRID = {"additional_config": {"gdn_prefill_backend": "triton"}}
_SERVE_HYBRID = ["--enable-prefix-caching", "--gdn-prefill-backend", "triton"]
#: fp16 states of linear attention, which make vLLM's pages smaller: 800 tokens in place of 1,568 (models.py).
_HALF_STATES = {"mamba_ssm_cache_dtype": "float16"}
#: 160 MiB are 100 pages of qwen3.5's 800 tokens. The prompts of `longer` need 120 or more.
_FEW_PAGES = {"kv_cache_memory_bytes": 160 << 20, "disable_log_stats": False}
#: 23 MiB are 5,000 tokens of deepseek.
_FEW_LATENTS = {"kv_cache_memory_bytes": 23 << 20, "disable_log_stats": False}
#: Decode context parallelism of two ranks, which exchange partial results by all-to-all.
_DCP = {"decode_context_parallel_size": 2, "dcp_comm_backend": "a2a"}
#: 0.26.0 has no int8 cache, no class for Qwen3.5 without images, and refuses Gemma 3 without images too.
#: Jobs of Gemma 4, PaliGemma 2 and Molmo 2 are 0.33.0's.
_NOT_0_26 = ("qwen3.5", "qwen3-next", "deepseek-int8", "gemma3-text", "gemma4", "paligemma2", "molmo2")
#: _SDPA makes vLLM's vision encoder call PyTorch's attention, in all jobs with images; _VISION makes volta_fa run these calls.
_VISION = {"VOLTA_FA_VLLM_VISION": "1", "VOLTA_FA_LOG": "1"}
_SDPA = {"mm_encoder_attn_backend": "TORCH_SDPA"}

#: Models with Gated DeltaNet, a linear attention, in three of four layers. Below, for each of them: endings of two jobs' names, as in
#: COMPARISONS, and what the pair shows.
_WITH_DELTA_NET = ("qwen3.5", "qwen3-next")
_DELTA_NET = [
    ("-custom", "-triton", "CUDA graphs, prefix caching"),
    ("-piecewise-custom", "-triton", "piecewise CUDA graphs"),
    ("-mtp-custom", "-triton", "draft head of three tokens"),
    ("-mtp-triton", "-triton", "the same with vLLM's backend"),
    ("-uncached-custom", "-uncached-triton", "half states, no prefix caching, eager"),
    ("-fp8-custom", "-fp8-triton", "fp8 cache"),
    ("-int8-custom", "-int8-triton", "int8 cache"),
]
#: Results compared: the job ("ours" in compare.py), the job with the expected tokens ("theirs"), and what the pair shows.
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
    ("int8k_int4v-custom", "int4-triton", "int8 keys and int4 values, CUDA graphs, against int4"),
    ("anchored-custom", "llama128-triton", "anchored windows as long as the sequences, CUDA graphs"),
    ("ngram-custom", "repeated-custom", "speculation"),
    ("preempted-custom", "long-custom", "prefix caching under preemption"),
    ("volta-custom", "llama64-triton", "Volta's kernels"),
    ("two-gpus-custom", "two-gpus-triton", "tensor parallelism"),
    ("dcp-custom", "dcp-triton", "decode context parallelism, against none"),
    ("dcp-graph-custom", "dcp-triton", "the same, CUDA graphs"),
    ("sinks-custom", "sinks-triton", "sinks without windows"),
    ("dcp-sinks-custom", "sinks-triton", "the same, decode context parallelism of two ranks on one GPU"),
    ("dcp-sinks-ag-custom", "sinks-triton", "the same, all-gather and reduce-scatter, 16 tokens at a time"),
    ("server-custom", "llama128-custom", "HTTP server, against the engine"),
    ("server-hybrid-custom", "qwen3-next-custom", "the same, Gated DeltaNet"),
    *((name + ours, name + theirs, f"Gated DeltaNet, {what}") for name in _WITH_DELTA_NET for ours, theirs, what in _DELTA_NET),
    ("qwen3.5-preempted-custom", "qwen3.5-longer-triton", "Gated DeltaNet, preemption"),
    ("granite4-custom", "granite4-triton", "Mamba 2, CUDA graphs, prefix caching"),
    ("granite4-uncached-custom", "granite4-uncached-triton", "Mamba 2, no prefix caching, eager"),
    ("jamba-custom", "jamba-triton", "Mamba 1"),
    ("deepseek-fp8-custom", "deepseek-fp8-triton", "MLA, fp8 cache"),
    ("deepseek-int8-custom", "deepseek-fp8-triton", "MLA, int8 cache, vLLM's in fp8"),
    ("deepseek-preempted-custom", "deepseek-long-triton", "MLA, preemption"),
    ("qwen3-vl-custom", "qwen3-vl-triton", "images, both kinds of attention"),
    ("qwen3-vl-graph-custom", "qwen3-vl-triton", "images, CUDA graphs"),
    ("gemma3-vision-custom", "gemma3-triton", "images, the encoder's attention"),
    ("gemma3-custom", "gemma3-triton", "images whose tokens see each other, both kinds of attention"),
    ("gemma3-graph-custom", "gemma3-triton", "the same, CUDA graphs"),
    ("gemma3-chunked-custom", "gemma3-triton", "the same, chunks of 256 tokens"),
    ("gemma3-fp8-custom", "gemma3-fp8-triton", "the same, fp8 cache"),
    ("gemma3-text-custom", "gemma3-text-triton", "a model with images, without them"),
    ("gemma4-text-custom", "gemma4-text-triton", "headdims 256 and 512, layers that share a cache"),
    ("gemma4-text-graph-custom", "gemma4-text-triton", "the same, CUDA graphs"),
    ("gemma4-custom", "gemma4-triton", "images whose tokens see each other in a window shorter than the image, headdims 256 and 512"),
    ("gemma4-graph-custom", "gemma4-triton", "the same, CUDA graphs"),
    ("gemma4-chunked-custom", "gemma4-triton", "the same, chunks of 256 tokens"),
    ("gemma4-fp8-custom", "gemma4-fp8-triton", "the same, fp8 cache"),
    ("paligemma2-custom", "paligemma2-triton", "an image whose tokens see each other, softcap"),
    ("paligemma2-graph-custom", "paligemma2-triton", "the same, CUDA graphs"),
    ("molmo2-custom", "molmo2-triton", "images whose tokens see each other"),
    ("molmo2-graph-custom", "molmo2-triton", "the same, CUDA graphs"),
    ("1cat-backend-custom", "llama128-triton", "1Cat-vLLM's own name for volta_fa's backend, CUDA graphs"),
    ("1cat-package-custom", "llama128-triton", "1Cat-vLLM's backend on volta_fa's functions, eager"),
    ("1cat-hybrid-custom", "jamba-triton", "the same, Mamba 1"),
    ("1cat-hybrid-backend-custom", "jamba-triton", "1Cat-vLLM's own name for volta_fa's backend, Mamba 1, CUDA graphs"),
    ("1cat-next-backend-custom", "qwen3-next-triton", "the same, Gated DeltaNet"),
    ("1cat-next-package-custom", "qwen3-next-triton", "1Cat-vLLM's backend on volta_fa's functions, Gated DeltaNet"),
    ("server-1cat-backend-custom", "1cat-backend-custom", "HTTP server, against the engine"),
    ("server-1cat-package-custom", "1cat-package-custom", "the same"),
    ("server-jamba-custom", "1cat-hybrid-backend-custom", "the same, Mamba 1"),
]  # fmt: skip
#: Results without a counterpart in vLLM: the job, a job whose error against float32 its own may reach twice, and what it shows. Anchored
#: windows (VOLTA_FA_VLLM_ANCHORED_WINDOW): a query sees the sequence's first tokens, and the last ones up to its own.
ALONE = [("anchored-short-custom", "llama128-triton", "anchored windows of 200 tokens, CUDA graphs")]
#: vLLM's own backends against each other: their differences are rounding. Tolerances of COMPARISONS follow from these.
CONTROLS = [
    ("llama128-flash", "llama128-triton"),
    ("llama64-flash", "llama64-triton"),
    ("mistral-flash", "mistral-triton"),
    ("llama64-graph-triton", "llama64-triton"),
]


def job(name: str, model: str, backend: str, **options: Any) -> dict:
    """Returns a job of kind tokens. `options`: further keys."""
    return {"name": name, "kind": "tokens", "model": model, "backend": backend, **options}


def pair(name: str, model: str, theirs: str = TRITON, env: dict | None = None, **options: Any) -> list[dict]:
    """Returns the same job for CUSTOM, with env, and for one of vLLM's backends."""
    return [job(f"{name}-custom", model, OURS, env=env or {}, **options), job(f"{name}-triton", model, theirs, **options)]


def hybrid_jobs() -> list[dict]:
    """Returns the jobs of models whose other layers have states of a fixed size: vLLM makes large pages for them."""
    cached, eager = _HYBRID | {"enable_prefix_caching": True}, _HYBRID | _EAGER
    uncached = eager | _HALF_STATES | {"enable_prefix_caching": False}
    found = []
    for name in _WITH_DELTA_NET:
        found += pair(name, name, env={"VOLTA_FA_LOG": "1"}, engine=cached)
        found += pair(f"{name}-mtp", name, logprobs=False, engine=cached | _MTP)
        found += pair(f"{name}-uncached", name, engine=uncached)
        found += pair(f"{name}-fp8", name, engine=cached | _EAGER | {"kv_cache_dtype": "fp8"})
        found += pair(f"{name}-int8", name, engine=cached | _EAGER | {"kv_cache_dtype": "int8_per_token_head"})
        found += [job(f"{name}-piecewise-custom", name, OURS, engine=cached | {"compilation_config": {"cudagraph_mode": "PIECEWISE"}})]
    found += pair("granite4", "granite4", engine=cached)
    longer = {"prompts": "longer", "engine": cached | _EAGER | _HALF_STATES}
    found += [
        job("qwen3.5-preempted-custom", "qwen3.5", OURS, **longer | {"engine": longer["engine"] | _FEW_PAGES}),
        job("qwen3.5-longer-triton", "qwen3.5", TRITON, **longer),
    ]
    found += pair("granite4-uncached", "granite4", engine=_EAGER | {"enable_prefix_caching": False})
    return found + pair("jamba", "jamba", engine=_EAGER | {"enable_prefix_caching": True})


def latent_jobs() -> list[dict]:
    """Returns the jobs of MLA with CUDA graphs, with other caches than fp16's, and with few blocks."""
    found = pair("deepseek-fp8", "deepseek", "TRITON_MLA", env=_MLA, engine=_EAGER | {"kv_cache_dtype": "fp8"})
    int8 = _EAGER | {"kv_cache_dtype": "int8_per_token_head"}
    return [
        job("deepseek-graph-custom", "deepseek", OURS, env=_MLA),
        *found,
        job("deepseek-int8-custom", "deepseek", OURS, env=_MLA, engine=int8),
        job("deepseek-preempted-custom", "deepseek", OURS, env=_MLA, prompts="long", engine=_EAGER | _FEW_LATENTS),
        job("deepseek-long-triton", "deepseek", "TRITON_MLA", prompts="long", engine=_EAGER),
    ]


def jobs_with_images(model: str, more: bool = False) -> list[dict]:
    """Returns a model's pair of jobs with images, and one with CUDA graphs. `more`: also with chunks of 256 tokens, and an fp8 cache."""
    images, engine = {"env": _VISION, "prompts": "images"}, _EAGER | _SDPA
    found = pair(model, model, engine=engine, **images)
    found += [job(f"{model}-graph-custom", model, OURS, engine=_SDPA, **images)]
    if more:
        found += [job(f"{model}-chunked-custom", model, OURS, engine=engine | {"max_num_batched_tokens": 256}, **images)]
        found += pair(f"{model}-fp8", model, engine=engine | {"kv_cache_dtype": "fp8"}, **images)
    return found


def image_jobs() -> list[dict]:
    """Returns the jobs of models with images. In the language models but Qwen3-VL's, tokens of an image see each other."""
    return [
        *jobs_with_images("qwen3-vl"),
        job("gemma3-vision-custom", "gemma3", TRITON, env=_VISION, prompts="images", engine=_EAGER | _SDPA),
        *jobs_with_images("gemma3", more=True),
        *pair("gemma3-text", "gemma3", engine=_EAGER | {"limit_mm_per_prompt": {"image": 0}}),
        *pair("gemma4-text", "gemma4-text", engine=_EAGER),
        job("gemma4-text-graph-custom", "gemma4-text", OURS),
        *jobs_with_images("gemma4", more=True),
        *jobs_with_images("paligemma2"),
        *jobs_with_images("molmo2"),
    ]


def sinks_jobs() -> list[dict]:
    """Returns the jobs of sinks with decode context parallelism, which has no windows: `plain` takes the window from the configuration."""
    plain = _EAGER | {"hf_overrides": {"sliding_window": None}}
    two = plain | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "worker_cls": "one_gpu.Worker"}
    shared = two | _DCP
    gathered = shared | {"dcp_comm_backend": "ag_rs", "cp_kv_cache_interleave_size": 16}
    found = pair("sinks", "sinks", engine=plain)
    return [*found, job("dcp-sinks-custom", "sinks", OURS, engine=shared), job("dcp-sinks-ag-custom", "sinks", OURS, engine=gathered)]


def server(name: str, model: str, backend: str, *serve: str, env: dict | None = None) -> dict:
    """Returns a job that sends the prompts of kind tokens by HTTP."""
    return {"name": name, "kind": "server", "model": model, "backend": backend, "cache_bytes": 2 << 30, "serve": serve, "env": env or {}}


def fork_jobs() -> list[dict]:
    """Returns the jobs of 1Cat-vLLM: its three ways to volta_fa (docs/guides/1cat-vllm.md). CUSTOM is the plugin's backend, as in vLLM.
    With VOLTA_FA_VLLM_1CAT, FLASH_ATTN_V100 runs volta_fa too: `backend` gives volta_fa's backend this name, `package` keeps 1Cat-vLLM's
    backend and replaces the functions that it calls."""
    name, cached = "FLASH_ATTN_V100", {"enable_prefix_caching": True}  # name: 1Cat-vLLM's for its backend
    backend = {"VOLTA_FA_VLLM_1CAT": "backend", "VOLTA_FA_LOG": "1"}
    kernels = ("FA2_D256_PREFILL", "FP8_PREFILL_BRIDGE", "PREFILL_GATHER_DENSE")  # of 1Cat-vLLM, which would take long prompts
    package = {"VOLTA_FA_VLLM_1CAT": "package", "VOLTA_FA_LOG": "1"} | {f"VLLM_FLASH_V100_{kernel}": "0" for kernel in kernels}
    # torch.compile of 2.11 refuses the layer names of its Gated DeltaNet; 1Cat-vLLM pins 2.10. This setting has not run.
    plain_names, delta_net = {"VLLM_USE_LAYERNAME": "0"}, _HYBRID | cached
    return [
        *pair("llama128", "llama128"),
        job("1cat-backend-custom", "llama128", name, env=backend),
        job("1cat-package-custom", "llama128", name, env=package, engine=_EAGER),
        *pair("jamba", "jamba", engine=cached),
        job("1cat-hybrid-custom", "jamba", name, env=package, engine=cached | _EAGER),
        job("1cat-hybrid-backend-custom", "jamba", name, env=backend, engine=cached),
        job("qwen3-next-custom", "qwen3-next", OURS, env=plain_names, engine=delta_net),
        job("qwen3-next-triton", "qwen3-next", TRITON, env=plain_names, engine=delta_net | _EAGER),
        job("1cat-next-backend-custom", "qwen3-next", name, env=backend | plain_names, engine=delta_net),
        job("1cat-next-package-custom", "qwen3-next", name, env=package | plain_names, engine=delta_net | _EAGER),
        server("server-custom", "llama128", OURS),
        server("server-1cat-backend-custom", "llama128", name, env=backend),
        server("server-1cat-package-custom", "llama128", name, "--enforce-eager", env=package),
        server("server-jamba-custom", "jamba", name, *_SERVE_HYBRID[:1], env=backend),
        server("server-hybrid-custom", "qwen3-next", name, *_SERVE_HYBRID, "--enforce-eager", env=backend | plain_names),
        {"name": "load", "kind": "load", "model": "llama128", "backend": name, "cache_bytes": 96 << 20, "env": backend},
    ]


def jobs(version: str, flash_attention: bool) -> list[dict]:
    """Returns the jobs of a version, the most important first. flash_attention: whether FlashAttention 3 is there."""
    if version == FORK:
        return [{"version": version, **j} for j in fork_jobs()]
    found = [{"name": "load", "kind": "load", "model": "llama128", "backend": OURS, "cache_bytes": 96 << 20}]
    if version == NEWEST:
        hybrid = {"cache_bytes": 400 << 20, "serve": _SERVE_HYBRID}
        found += [{"name": "load-hybrid", "kind": "load", "model": "qwen3.5", "backend": OURS, **hybrid}]
        found += [server("server-custom", "llama128", OURS), server("server-hybrid-custom", "qwen3-next", OURS, *_SERVE_HYBRID)]
    found += pair("llama128", "llama128", env={"VOLTA_FA_LOG": "1"})
    found += pair("gpt-oss", "gpt-oss", engine=_EAGER)  # FlashAttention 3 takes sinks with bf16 only
    if flash_attention:
        found += [job("llama128-flash", "llama128", FLASH)]
        found += [job(f"{m}-flash", m, FLASH, engine=_EAGER) for m in ("llama64", "mistral")]
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
            job("ngram-custom", "llama128", OURS, prompts="repeated", logprobs=False, engine={"speculative_config": _GUESSES}),
            job("repeated-custom", "llama128", OURS, prompts="repeated", engine=_EAGER),
            job("int8k_int4v-custom", "llama128", OURS, engine={"kv_cache_dtype": "int8k_int4v"}),
            job("int4-triton", "llama128", TRITON, engine=_EAGER | {"kv_cache_dtype": "int4_per_token_head"}),
            # a query sees the first 4 tokens and the last 100,000, so all, or the last 200
            job("anchored-custom", "llama128", OURS, env={"VOLTA_FA_VLLM_ANCHORED_WINDOW": "4:100000"}),
            job("anchored-short-custom", "llama128", OURS, env={"VOLTA_FA_VLLM_ANCHORED_WINDOW": "4:200"}),
            job("volta-custom", "llama64", OURS, env={"VOLTA_FA_FAMILY": "volta"}, engine=_EAGER),
        ]
        found += sinks_jobs() + hybrid_jobs() + latent_jobs() + image_jobs()
    else:
        found += [int8[0] | {"name": "int8-refused", "refused": "kv_cache_dtype not supported"}]
        found += [job("llama64-graph-triton", "llama64", TRITON)]
    if version == "0.26.0":
        found += [j for j in hybrid_jobs() + latent_jobs() + image_jobs() if not j["name"].startswith(_NOT_0_26)]
    two = _EAGER | {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
    found += pair("two-gpus", "llama64", gpus=2, engine=two)
    # Decode context parallelism splits the cache of mqa's one KV head. TRITON_ATTN has none, so its job runs without. The other
    # communication backend, ag_rs, needs a function of NCCL that torch 2.11's lacks (ncclCommSuspend).
    found += [job("dcp-custom", "mqa", OURS, gpus=2, engine=two | _DCP), job("dcp-triton", "mqa", TRITON, gpus=2, engine=two)]
    found += [job("dcp-graph-custom", "mqa", OURS, gpus=2, engine=two | _DCP | {"enforce_eager": False})]
    return [{"version": version, **j} for j in found]
