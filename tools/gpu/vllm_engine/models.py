"""Writes small random models with sharp attention, and a tokenizer and a LoRA adapter for them: python models.py FOLDER [NAME...]

run.py runs vLLM on them with volta_fa's attention and with vLLM's own, and compares the tokens; no checkpoints are needed. Sharp: a few
keys get most of a row's attention, as in trained models, so a wrong key changes tokens. The seed is fixed, so all runs on one kind of
device have the same weights. Weights are float16."""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import molmo2
import torch
import transformers as t
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 4096
LORA_RANK = 8
#: Tokens that begin and end a text.
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
#: Arguments of transformers' configurations that most models share.
_LLAMA = {"num_hidden_layers": 4, "max_position_embeddings": 8192, "tie_word_embeddings": False, **_ENDS}
_SMALL = {"hidden_size": 1024, "intermediate_size": 2048, **_LLAMA}
#: MLA with latents of DeepSeek's sizes. All four layers are dense (first_k_dense_replace), so no expert is used.
_DEEPSEEK = {
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe_intermediate_size": 512, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 4, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
}  # fmt: skip
#: gpt-oss with all its experts active, because a router's choice between experts turns rounding errors into other tokens
_GPT_OSS = {
    "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 64, "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 4, **_ENDS,
}  # fmt: skip
#: Three layers of linear attention, then one of attention.
_HYBRID_LAYERS = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
#: Qwen3.5's sizes of a cached token and of a state, so vLLM makes pages of 800 (states in float16) or 1,568 tokens (float32)
_QWEN3_5 = {
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, **_HYBRID_LAYERS,
}  # fmt: skip
#: Qwen3-Next's sizes. All experts are active, as gpt-oss's.
_QWEN3_NEXT = {
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 8, **_HYBRID_LAYERS,
}  # fmt: skip
#: without experts, as Granite 4's smallest
_GRANITE4 = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "attention_multiplier": 128**-0.5, "shared_intermediate_size": 2048,
    "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 32, "mamba_d_state": 128, **_HYBRID_LAYERS,
}  # fmt: skip
_JAMBA = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 4,
    "attn_layer_offset": 3, "use_mamba_kernels": False,
}  # fmt: skip
#: Qwen3-VL's positions in three dimensions; vLLM has no default for the sections, transformers has.
_MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
#: Layers of all the Gemmas with images.
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
#: Gemma 4's headdims: 256 with a window and 512 without.
_GEMMA4 = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "num_attention_heads": 8, "head_dim": 256, "global_head_dim": 512,
    **_WINDOWS, **_SMALL | {"tie_word_embeddings": True},
}  # fmt: skip
#: A vision encoder with the headdim of Qwen3-VL's and SigLIP's: 72, with 8 heads.
_VISION = {"hidden_size": 576, "intermediate_size": 1024}
#: The first token that stands for an image or its ends; molmo2's follow the vocabulary.
FIRST_IMAGE_TOKEN = VOCABULARY - 8


def _image_tokens(*names: str) -> dict[str, int]:
    """Returns tokens with these names, in place of the vocabulary's last."""
    return {name: FIRST_IMAGE_TOKEN + i for i, name in enumerate(names)}


IMAGE_TOKENS = {
    "qwen3-vl": _image_tokens("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"),
    "gemma3": _image_tokens("<start_of_image>", "<image_soft_token>", "<end_of_image>", *("\n" * i for i in range(1, 5))),
    "gemma4": _image_tokens("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video|>"),
    "paligemma2": _image_tokens("<image>", "\n"),
    "molmo2": dict(zip(molmo2.TOKENS, range(VOCABULARY, VOCABULARY + len(molmo2.TOKENS)))),
}
_QWEN_IDS, _GEMMA_IDS, _GEMMA4_IDS = (list(IMAGE_TOKENS[name].values()) for name in ("qwen3-vl", "gemma3", "gemma4"))
#: What a tokenizer calls the first of these tokens, where its processor asks.
_ROLES = {
    "gemma3": ("boi_token", "image_token", "eoi_token"),
    "gemma4": ("boi_token", "image_token", "eoi_token", "boa_token", "audio_token", "eoa_token"),
    "paligemma2": ("image_token",),
}
CONFIGS = {
    "llama64": t.LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=16, num_key_value_heads=4, head_dim=64, **_SMALL),
    "llama128": t.LlamaConfig(
        vocab_size=VOCABULARY, num_attention_heads=16, num_key_value_heads=4, head_dim=128, **_SMALL | {"hidden_size": 2048}
    ),
    "mqa": t.LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=16, num_key_value_heads=1, head_dim=64, **_SMALL),
    # sinks without windows: vLLM's gpt-oss has no decode context parallelism
    "sinks": t.GraniteSWAConfig(
        vocab_size=VOCABULARY, num_attention_heads=16, num_key_value_heads=1, attention_multiplier=64**-0.5, sliding_window=8192,
        layer_types=["full_attention"] * 4, **_SMALL,
    ),
    "mistral": t.MistralConfig(
        vocab_size=VOCABULARY, num_attention_heads=8, num_key_value_heads=2, head_dim=128, sliding_window=300, **_SMALL
    ),
    "gemma2": t.Gemma2Config(
        vocab_size=VOCABULARY, num_attention_heads=8, num_key_value_heads=4, head_dim=128, query_pre_attn_scalar=128,
        sliding_window=512, attn_logit_softcapping=5.0, **_SMALL | {"tie_word_embeddings": True},
    ),
    "bloom": t.BloomConfig(vocab_size=VOCABULARY, hidden_size=1024, n_layer=4, n_head=16, **_ENDS),
    "deepseek": t.DeepseekV2Config(vocab_size=VOCABULARY, num_attention_heads=16, num_key_value_heads=16, **_DEEPSEEK, **_SMALL),
    "gpt-oss": t.GptOssConfig(vocab_size=VOCABULARY, **_GPT_OSS),
    "bert": t.BertConfig(vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8),
    "qwen3.5": t.Qwen3_5TextConfig(vocab_size=VOCABULARY, **_QWEN3_5, **_SMALL),
    "qwen3-next": t.Qwen3NextConfig(vocab_size=VOCABULARY, **_QWEN3_NEXT, **_SMALL),
    "granite4": t.GraniteMoeHybridConfig(vocab_size=VOCABULARY, **_GRANITE4, **_SMALL),
    "jamba": t.JambaConfig(vocab_size=VOCABULARY, **_JAMBA, **_SMALL),
    "qwen3-vl": t.Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "rope_parameters": _MROPE,
            **_SMALL,
        },
        vision_config={"depth": 4, "num_heads": 8, "out_hidden_size": 1024, "deepstack_visual_indexes": [1, 2, 3], **_VISION},
        **dict(zip(("vision_start_token_id", "image_token_id", "video_token_id", "vision_end_token_id"), _QWEN_IDS)),
    ),
    "gemma3": t.Gemma3Config(
        text_config={
            "vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "query_pre_attn_scalar": 128,
            "sliding_window": 512, **_WINDOWS, **_SMALL | {"tie_word_embeddings": True},
        },
        vision_config={"num_hidden_layers": 4, "num_attention_heads": 8, "image_size": 448, "patch_size": 14, **_VISION},
        mm_tokens_per_image=64, **dict(zip(("boi_token_index", "image_token_index", "eoi_token_index"), _GEMMA_IDS)),
    ),
    # as Gemma 4 E2B: one KV head, the last two layers read the cache of the first two, and each layer adds embeddings of its own
    "gemma4-text": t.Gemma4TextConfig(
        num_key_value_heads=1, sliding_window=512, hidden_size_per_layer_input=64, num_kv_shared_layers=2, use_double_wide_mlp=True,
        **_GEMMA4,
    ),
    # as Gemma 4 31B: images of up to 140 tokens see each other inside a window that is shorter, keys are also the values at headdim 512
    "gemma4": t.Gemma4Config(
        text_config={
            "num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 96,
            "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, **_GEMMA4,
        },
        vision_config={
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 72, "position_embedding_size": 256,
            "default_output_length": 140, **_VISION,
        },
        **dict(zip(("boi_token_id", "image_token_id", "eoi_token_id", "boa_token_id", "audio_token_id", "eoa_token_index",
                    "video_token_id"), _GEMMA4_IDS)),
    ),
    "paligemma2": t.PaliGemmaConfig(
        text_config={
            "model_type": "gemma2", "vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
            # vLLM caps the logits, transformers does not, so neither here
            "query_pre_attn_scalar": 128, "sliding_window": 4096, "attn_logit_softcapping": 5.0, "final_logit_softcapping": None,
            **_WINDOWS, **_SMALL | {"tie_word_embeddings": True},
        },
        vision_config={"num_hidden_layers": 4, "num_attention_heads": 8, "image_size": 224, "patch_size": 14, **_VISION,
                       "vision_use_head": False},
        projection_dim=1024, hidden_size=1024, image_token_index=FIRST_IMAGE_TOKEN,
    ),
}  # fmt: skip
#: Families whose norms add 1 to their weights, but for the gated one after linear attention.
_PLUS_ONE = ("gemma2", "gemma3", "paligemma2", "qwen3.5", "qwen3-next")
#: Models whose embeddings are also their output projection, and the weight of the last norm. Small embeddings and a large weight keep these
#: models from repeating a token.
_LAST_NORM = {"gemma3": 6.0, "gemma4": 14.0, "gemma4-text": 14.0, "paligemma2": 21.0}
#: Standard deviation of the embeddings, of models where it is not 1.
_EMBEDDINGS = {
    "gemma2": 0.01, "gemma3": 0.005, "gemma4": 0.0025, "gemma4-text": 0.0025, "paligemma2": 0.0015, "bloom": 0.05, "qwen3.5": 9.0,
    "qwen3-next": 9.0,
}  # fmt: skip


def draw(name: str, parameter: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Returns random values of a parameter, of a size that keeps activations near 1 and attention sharp."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if parameter.endswith("bias"):
        return 0.1 * noise
    if parameter.endswith("sinks"):
        return noise
    if len(shape) == 1:  # a norm's weight, or one value of each head of a state-space layer
        if name in _LAST_NORM and parameter.endswith(("language_model.norm.weight", "model.norm.weight")):
            return 0.1 * noise + _LAST_NORM[name]
        if name.startswith("gemma4") and parameter.endswith(("q_norm.weight", "k_norm.weight")):
            return 0.04 * noise + 0.4  # its attention has no softmax scale
        plus_one = name in _PLUS_ONE and "vision" not in parameter and "linear_attn.norm" not in parameter
        return 0.1 * noise + (0.0 if plus_one else 1.0) + (0.6 if parameter.endswith(("q_norm.weight", "k_norm.weight")) else 0.0)
    if len(shape) > 2 and name != "gpt-oss":  # a convolution
        return noise * 1.6 * shape[1:].numel() ** -0.5
    if "embed" in parameter and "patch" not in parameter:
        return noise * (0.1 if "per_layer" in parameter else _EMBEDDINGS.get(name, 1.0))
    # Molmo 2's images get embeddings of the size of the text's
    gain = {"bloom": 3.0}.get(name, 0.1 if "image_pooling_2d.wo" in parameter else 1.6)
    return noise * gain * shape[1] ** -0.5  # shape[1]: inputs. With inputs near 1, outputs have the deviation `gain`


def drafter(state: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns the weights of a draft head: an attention layer, and a projection that mostly repeats the last token's embedding.

    As the models' embeddings are large, some of its guesses are right."""
    layer = "model.layers.3."
    found = {f"mtp.layers.0.{key.removeprefix(layer)}": x for key, x in state.items() if key.startswith(layer)}
    found |= {f"mtp.{name}.weight": state["model.norm.weight"] for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    columns = state["model.norm.weight"].numel()
    noise = draw("qwen3.5", "mtp.fc.weight", torch.Size((columns, 2 * columns)), generator).cpu()
    found["mtp.fc.weight"] = (0.2 * noise + 6.0 * torch.eye(columns, 2 * columns)).half()
    return {key: x.clone() for key, x in found.items()}  # files hold no tensor twice


def parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Size]]:
    """Yields names and shapes as in checkpoints, where each expert of Qwen3-Next has matrices of its own."""
    for key, p in model.named_parameters():
        if type(model).__name__ != "Qwen3NextForCausalLM" or ".experts." not in key:
            yield key, p.shape
            continue
        parts = ("gate_proj", "up_proj") if key.endswith("gate_up_proj") else ("down_proj",)
        for i, part in itertools.product(range(p.shape[0]), parts):
            yield f"{key.rpartition('.')[0]}.{i}.{part}.weight", torch.Size((p.shape[1] // len(parts), p.shape[2]))


def write_processor(name: str, folder: Path, tokenizer: t.PreTrainedTokenizerFast) -> None:
    """Writes the processor of a model with images."""
    if name == "qwen3-vl":
        size = {"shortest_edge": 64**2, "longest_edge": 640**2}
        images, videos = (make(size=size, patch_size=16) for make in (t.Qwen2VLImageProcessor, t.Qwen3VLVideoProcessor))
        t.Qwen3VLProcessor(images, tokenizer, videos).save_pretrained(folder)
    elif name == "gemma4":
        images, sounds, videos = t.Gemma4ImageProcessor(max_soft_tokens=140), t.Gemma4AudioFeatureExtractor(), t.Gemma4VideoProcessor()
        t.Gemma4Processor(sounds, images, tokenizer, videos, image_seq_length=140).save_pretrained(folder)
    elif name == "paligemma2":
        images = t.SiglipImageProcessor(size={"height": 224, "width": 224})
        images.image_seq_length = 256
        t.PaliGemmaProcessor(images, tokenizer).save_pretrained(folder)
    else:
        images = t.Gemma3ImageProcessor(size={"height": 448, "width": 448}, do_pan_and_scan=False)
        t.Gemma3Processor(images, tokenizer, image_seq_length=64).save_pretrained(folder)


def write_tokenizer(name: str, folder: Path) -> None:
    """Writes a tokenizer of one word per token: `t7` is token 7. For a model with images, also writes its processor."""
    of_images = IMAGE_TOKENS.get(name, {})
    named = {i: f"t{i}" for i in range(VOCABULARY)} | {0: "<unk>", 1: "<s>", 2: "</s>"} | {i: token for token, i in of_images.items()}
    words = {token: i for i, token in named.items()}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    ends = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    roles = dict(zip(_ROLES.get(name, of_images), of_images))
    fast = t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=roles, **ends)
    fast.save_pretrained(folder)
    if of_images and name != "molmo2":
        write_processor(name, folder, fast)


def write_model(name: str, folder: Path, device: str) -> None:
    """Writes configuration, weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "molmo2":  # transformers 5.17 does not have it
        molmo2.write_config(folder)
        shapes = molmo2.shapes()
    else:
        with torch.device("meta"):
            kind = t.AutoModel if name == "bert" else t.AutoModelForImageTextToText if name in IMAGE_TOKENS else t.AutoModelForCausalLM
            model = kind.from_config(CONFIGS[name], dtype=torch.float16)
        shapes = dict(parameters(model))
        CONFIGS[name].architectures, CONFIGS[name].dtype = [type(model).__name__], "float16"
        CONFIGS[name].save_pretrained(folder)
    generator = torch.Generator(device).manual_seed(1)
    state = {key: draw(name, key, torch.Size(shape), generator).half().cpu() for key, shape in shapes.items()}
    if name in ("gemma3", "paligemma2"):  # checkpoints have an older name, which vLLM reads
        state = {key.replace("vision_tower.", "vision_tower.vision_model."): x for key, x in state.items()}
    if name in ("qwen3.5", "qwen3-next"):
        state |= drafter(state, generator)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(name, folder)


def write_lora(folder: Path) -> None:
    """Writes an adapter for llama64's attention."""
    config, generator = CONFIGS["llama64"], torch.Generator().manual_seed(2)
    rows = {"q_proj": 1024, "k_proj": 256, "v_proj": 256, "o_proj": config.hidden_size}
    state = {}
    for layer in range(config.num_hidden_layers):
        for target, outputs in rows.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            state[f"{key}.lora_A.weight"] = torch.randn(LORA_RANK, 1024, generator=generator).mul(1024**-0.5).half()
            state[f"{key}.lora_B.weight"] = torch.randn(outputs, LORA_RANK, generator=generator).mul(0.15).half()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": LORA_RANK, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none"}
    about |= {"target_modules": list(rows), "base_model_name_or_path": "llama64", "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(about))


def main() -> None:
    folder, *names = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in names or [*CONFIGS, "molmo2"]:
        write_model(name, Path(folder) / name, device)
    write_lora(Path(folder) / "lora")


if __name__ == "__main__":
    main()
