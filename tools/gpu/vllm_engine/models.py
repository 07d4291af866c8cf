"""Writes small random models with sharp attention, and a tokenizer and a LoRA adapter for them: python models.py FOLDER [NAME...]

The seed is fixed, so all runs on one kind of device have the same weights. Weights are float16.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    DeepseekV2Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
)

VOCABULARY = 4096
LORA_RANK = 8
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {"num_hidden_layers": 4, "max_position_embeddings": 8192, "tie_word_embeddings": False, **_ENDS}
_SMALL = {"hidden_size": 1024, "intermediate_size": 2048, **_LLAMA}
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
CONFIGS = {
    "llama64": LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=16, num_key_value_heads=4, head_dim=64, **_SMALL),
    "llama128": LlamaConfig(
        vocab_size=VOCABULARY, num_attention_heads=16, num_key_value_heads=4, head_dim=128, **_SMALL | {"hidden_size": 2048}
    ),
    "mistral": MistralConfig(
        vocab_size=VOCABULARY, num_attention_heads=8, num_key_value_heads=2, head_dim=128, sliding_window=300, **_SMALL
    ),
    "gemma2": Gemma2Config(
        vocab_size=VOCABULARY, num_attention_heads=8, num_key_value_heads=4, head_dim=128, query_pre_attn_scalar=128,
        sliding_window=512, attn_logit_softcapping=5.0, **_SMALL | {"tie_word_embeddings": True},
    ),
    "bloom": BloomConfig(vocab_size=VOCABULARY, hidden_size=1024, n_layer=4, n_head=16, **_ENDS),
    "deepseek": DeepseekV2Config(vocab_size=VOCABULARY, num_attention_heads=16, num_key_value_heads=16, **_DEEPSEEK, **_SMALL),
    "gpt-oss": GptOssConfig(vocab_size=VOCABULARY, **_GPT_OSS),
    "bert": BertConfig(vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8),
}  # fmt: skip


def draw(name: str, parameter: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Returns random values of a parameter, of a size that keeps activations near 1 and attention sharp."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if parameter.endswith("bias"):
        return 0.1 * noise
    if parameter.endswith("sinks"):
        return noise
    if len(shape) == 1:  # a norm's weight; gemma adds 1 to it
        return 0.1 * noise + (0.0 if name == "gemma2" else 1.0)
    if "embed" in parameter:
        return noise * {"gemma2": 0.01, "bloom": 0.05}.get(name, 1.0)
    return noise * (3.0 if name == "bloom" else 1.6) * shape[1] ** -0.5


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of one word per token: `t7` is token 7."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    ends = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)


def write_model(name: str, folder: Path, device: str) -> None:
    """Writes configuration, weights and tokenizer."""
    config = CONFIGS[name]
    with torch.device("meta"):
        model = (AutoModel if name == "bert" else AutoModelForCausalLM).from_config(config, dtype=torch.float16)
    generator = torch.Generator(device).manual_seed(1)
    state = {key: draw(name, key, p.shape, generator).half().cpu() for key, p in model.named_parameters()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures, config.dtype = [type(model).__name__], "float16"
    config.save_pretrained(folder)
    write_tokenizer(folder)


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
    """Writes the named models, or all."""
    folder, *names = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in names or CONFIGS:
        write_model(name, Path(folder) / name, device)
    write_lora(Path(folder) / "lora")


if __name__ == "__main__":
    main()
