"""Runs volta_fa's backend inside vLLM's own model without a GPU, in float32, and measures its error: python on_cpu.py MODEL MODELS

MODEL is a name of models.py, with its folder in MODELS. vLLM (0.33.0) loads the model, plans its cache and builds the metadata of each
step. One prompt goes through the model in chunks, and its end token by token. The library's CPU backend computes the attention, PyTorch
all else. Prints the largest error of a log-probability in each step, against transformers (reference.py). Exits with 1 if one exceeds
LIMIT, or with a quantized cache, whose errors are larger, only if one is NaN. Without a GPU it needs stub CUDA libraries (README.md).

Environment: CACHE, a value of --kv-cache-dtype. VOLTA_FA_VLLM_ANCHORED_WINDOW=ANCHORS:WINDOW limits attention, here and in the reference,
to a sequence's first ANCHORS tokens and the last WINDOW ones. PYTHONPATH as run.py sets it."""

import math
import os
import random
import sys
import tempfile
from pathlib import Path

import torch
import transformers
import vllm.v1.attention.ops.vit_attn_wrappers as vision
from engine import IMAGE_MARKS, VOCABULARY, image_prompts  # IMAGE_MARKS: by model with images, the tokens of a prompt that stand for one
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.core.kv_cache_planning import get_kv_cache_configs
from vllm.v1.engine.core import get_global_kv_cache_groups, resolve_kv_cache_layout
from vllm.v1.worker.gpu import attn_utils as runner

import reference
from volta_fa.integrations.vllm.backend import VoltaBackend

DEVICE = torch.device("cpu")
#: Largest error, in nats, that is rounding of float32. A causal mask in place of PaliGemma's makes one of 0.27.
LIMIT = 0.01
#: A value of --kv-cache-dtype; all but auto quantize.
CACHE_DTYPE = os.environ.get("CACHE", "auto")
#: Number of the prompt in image_prompts(): one of 300 words and three images; PaliGemma's has one image.
WHICH = 5
#: Where chunks end, if that is not inside of an image.
ENDS = (150, 400, 500)


def configuration(folder: Path, with_images: bool):
    """Returns vLLM's configuration of an engine, on the CPU."""
    options: dict = {}
    if with_images:
        # the most images of a prompt: models without a mark (PaliGemma) take one
        count = 3 if IMAGE_MARKS[folder.name] else 1
        options = {"limit_mm_per_prompt": {"image": count, "video": 0}, "mm_encoder_attn_backend": "TORCH_SDPA"}
    arguments = EngineArgs(
        model=str(folder), dtype="float32", max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=2048, enforce_eager=True,
        attention_backend="CUSTOM", kv_cache_dtype=CACHE_DTYPE, kv_cache_memory_bytes=300 << 20,
        compilation_config={"custom_ops": ["none"]}, **options,
    )  # fmt: skip
    config = arguments.create_engine_config()
    config.device_config.device, config.device_config.device_type = DEVICE, "cpu"
    return config


class Cache:
    """The cache that vLLM plans for a model, bound to its layers, with the pages of one sequence."""

    def __init__(self, config, tokens: int) -> None:
        layers, specs = config.compilation_config.static_forward_context, runner.get_kv_cache_spec(config)
        names = [layout if isinstance(layout, str) else layout.name for layout in get_supported_kv_cache_layouts((VoltaBackend,))]
        layout = resolve_kv_cache_layout(config, [names], list(specs.values())).name
        config.cache_config.kv_cache_layout = layout
        groups = get_global_kv_cache_groups(config, [specs])
        [self.plan] = get_kv_cache_configs(config, [specs], [300 << 20], groups)
        self.plan.kv_cache_layout = layout
        self.groups, _, self.page_sizes = runner.init_attn_backend(self.plan, config, DEVICE)
        runner.init_kv_cache(layers, self.plan, DEVICE, self.page_sizes, config, attn_groups=[g for group in self.groups for g in group])
        self.tables, first = [], 1  # layers of several groups share the memory, so each group has blocks of its own
        for group, page in zip(self.plan.kv_cache_groups, self.page_sizes):
            block = group.kv_cache_spec.block_size
            # the planner's blocks may be larger than the pages of the backend's block table: block // page pages each
            blocks = torch.arange(first, first := first - (-tokens // block))  # enough for all tokens, rounded up
            self.tables.append((blocks[:, None] * (block // page) + torch.arange(block // page)).flatten()[None].int())
            print(f"pages of {page} tokens: {', '.join(group.layer_names)}")

    def step(self, begin: int, end: int, spans: list) -> dict:
        """Returns the arguments of set_forward_context for tokens begin to end. spans: the first and last token of each image."""
        at = torch.arange(begin, end)
        slots = torch.stack([table[0][at // page].long() * page + at % page for table, page in zip(self.tables, self.page_sizes)])
        starts, length = torch.tensor([0, end - begin], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
        metadata = runner.build_attn_metadata(
            attn_groups=self.groups, num_reqs=1, num_tokens=end - begin, query_start_loc_gpu=starts, query_start_loc_cpu=starts,
            max_query_len=end - begin, seq_lens=length, max_seq_len=end, block_tables=self.tables, slot_mappings=slots,
            kv_cache_config=self.plan, seq_lens_cpu_upper_bound=length, positions=at, mm_req_doc_ranges={0: spans} if spans else None,
        )  # fmt: skip
        mapping = runner.build_slot_mappings_by_layer(slots, self.plan)
        return {"attn_metadata": metadata, "num_tokens": end - begin, "slot_mapping": mapping}


def embed(config, model, prompt: dict) -> tuple[list[int], list, torch.Tensor]:
    """Returns a prompt's tokens with those of its images, the first and last token of each image, and all embeddings."""
    processor = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    found = processor(prompt["prompt_token_ids"], processor.info.parse_mm_data(prompt["multi_modal_data"]))
    tokens, items = found["prompt_token_ids"], found["mm_kwargs"]["image"]
    spans = [span for place in found["mm_placeholders"]["image"] for span in place.extract_embeds_range()]
    is_image, features = torch.zeros(len(tokens), dtype=torch.bool), []
    for first, last in spans:
        is_image[first : last + 1] = True
    with set_forward_context(None, config):
        for _, _, batch in group_and_batch_mm_kwargs([("image", item) for item in items], device="cpu"):
            features += list(model.embed_multimodal(**batch))
        return tokens, spans, model.embed_input_ids(torch.tensor(tokens), features, is_multimodal=is_image)


def exact(folder: Path, tokens: list[int], prompt: dict | None) -> torch.Tensor:
    """Returns the log-probabilities of the vocabulary after each token, (tokens, VOCABULARY), by transformers."""
    # float32 with eager attention
    model, ids, images = reference.load_model(folder, prompt is not None).to("cpu"), torch.tensor([tokens]), None
    if prompt is not None:
        processor = transformers.AutoProcessor.from_pretrained(folder).image_processor
        images = processor(prompt["multi_modal_data"]["image"], return_tensors="pt")
    # the images and the attention mask
    options = reference.arguments(folder.name, model, ids, images, os.environ.get("VOLTA_FA_VLLM_ANCHORED_WINDOW"))
    return model(ids, use_cache=False, **options).logits[0].log_softmax(-1)


@torch.no_grad()
def main() -> None:
    folder = Path(sys.argv[2]) / sys.argv[1]
    load_general_plugins()
    VoltaBackend.supported_dtypes = [torch.float32]  # which the library's CPU backend computes
    torch.accelerator.get_memory_info = lambda *_: (100 << 30, 100 << 30)  # Gemma 4's encoder asks for the GPU's
    torch.library.impl("vllm::torch_sdpa_wrapper", "CPU", vision.torch_sdpa_wrapper)
    prompt = image_prompts(folder.name)[WHICH] if folder.name in IMAGE_MARKS else None
    config = configuration(folder, prompt is not None)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, backend="gloo")  # one process, rank 0
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)
        for layer in config.compilation_config.static_forward_context.values():
            layer.use_direct_call = True  # else it calls operators that exist for CUDA alone
        tokens, spans, embeddings = random.Random(5).choices(range(3, VOCABULARY), k=700), [], None
        if prompt is not None:
            tokens, spans, embeddings = embed(config, model, prompt)
        count, ends = len(tokens), [0]  # chunks end at ENDS, or after the image there; the last six tokens come one by one
        for end in ENDS:
            end = next(e for e in range(end, count) if not any(first < e <= last for first, last in spans))
            ends += [end] if ends[-1] < end < count - 8 else []
        ends += range(count - 6, count + 1)
        cache, logits = Cache(config, count), []
        for begin, end in zip(ends, ends[1:]):
            with set_forward_context(vllm_config=config, **cache.step(begin, end, spans)):
                given = {} if embeddings is None else {"inputs_embeds": embeddings[begin:end]}
                logits.append(model.compute_logits(model(torch.tensor(tokens[begin:end]), torch.arange(begin, end), **given)))
    errors = (torch.cat(logits).log_softmax(-1) - exact(folder, tokens, prompt)).abs().amax(-1)
    print(f"{folder.name}: {count} tokens, images {spans}")
    for begin, end in zip(ends, ends[1:]):
        print(f"tokens {begin} to {end}: error {errors[begin:end].max():.1e}")
    sys.stdout.flush()
    is_right = errors.max().item() <= (LIMIT if CACHE_DTYPE == "auto" else math.inf)
    os._exit(0 if is_right else 1)  # vLLM ends a process group that never had a GPU with an error


if __name__ == "__main__":
    main()
