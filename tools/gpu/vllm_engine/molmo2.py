"""A small Molmo 2, a vision-language model, for the vLLM jobs of run.py: configuration, processor, weights, and a float32 reference.

transformers 5.17 lacks it. The import registers it there, in place of a later release's own. vLLM runs its own model.
An image becomes two crops of one size, the whole image each time, where the real processor cuts large images into more. Its tokens, the
rows' ends included, see each other. Tokens of images follow the vocabulary, so no model generates one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.nn.functional as F
import transformers as t
from safetensors.torch import load_file

VOCABULARY = 4096
TOKENS = ("<|image|>", "<|video|>", "<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<im_end>", "<frame_start>",
          "<frame_end>", "<im_low>")  # fmt: skip
#: Patches of a crop's side, pixels of a patch's side, and patches of the side of a square that one token stands for.
_SIDE, _PATCH, _POOL = 14, 14, 2
_VISION = {
    "hidden_size": 576, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "head_dim": 72, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "image_default_input_size": [_PATCH * _SIDE] * 2,
    "image_patch_size": _PATCH, "image_num_pos": _SIDE**2,
}  # fmt: skip
_ADAPTER = {
    "vit_layers": [-1, -3], "pooling_attention_mask": True, "hidden_size": 576, "num_attention_heads": 8, "num_key_value_heads": 8,
    "head_dim": 72, "hidden_act": "silu", "intermediate_size": 2048, "text_hidden_size": 1024,
}  # fmt: skip
#: Qwen3's layers.
_TEXT = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": VOCABULARY, "max_position_embeddings": 8192,
}  # fmt: skip
_TEXT_OF_MOLMO2 = _TEXT | {
    "additional_vocab_size": 16, "qkv_bias": False, "hidden_act": "silu", "rope_theta": 1e6, "use_qk_norm": True, "qk_norm_type": "qwen3",
    "layer_norm_eps": 1e-6, "norm_after": False, "rope_scaling_layers": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip


class _Part(t.PreTrainedConfig):
    """A part of the configuration; the arguments are its attributes."""

    model_type = "molmo2_part"


class Molmo2Config(t.PreTrainedConfig):
    """The configuration, by default the small model's."""

    model_type = "molmo2"

    def __init__(
        self, text_config: dict | None = None, vit_config: dict | None = None, adapter_config: dict | None = None, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.text_config = _Part(**(text_config or _TEXT_OF_MOLMO2))
        self.vit_config, self.adapter_config = _Part(**(vit_config or _VISION)), _Part(**(adapter_config or _ADAPTER))
        ids = dict(zip(TOKENS, range(VOCABULARY, VOCABULARY + len(TOKENS))))
        self.image_patch_id, self.image_col_id, self.image_low_res_id = ids["<im_patch>"], ids["<im_col>"], ids["<im_low>"]
        self.image_start_token_id, self.image_end_token_id = ids["<im_start>"], ids["<im_end>"]
        self.low_res_image_start_token_id = ids["<low_res_im_start>"]
        self.frame_start_token_id, self.frame_end_token_id = ids["<frame_start>"], ids["<frame_end>"]


class Molmo2ImageProcessor:
    """Makes two crops of each image. vLLM reads the attributes."""

    patch_size, pooling_size, max_crops, overlap_margins = _PATCH, [_POOL, _POOL], 1, (0, 0)
    size: ClassVar = {"height": _PATCH * _SIDE, "width": _PATCH * _SIDE}

    def __init__(self) -> None:
        self._resize = t.SiglipImageProcessor(size=self.size)

    def __call__(self, images: list, return_tensors: str = "pt") -> t.BatchFeature:
        """Returns pixel_values (crops, patches, values of a patch), the patches of each token by their index in an image, and by image the
        number of crops and the rows and columns of tokens of both."""
        pixels = self._resize(images, return_tensors="pt")["pixel_values"].repeat_interleave(2, 0)
        patches = pixels.unfold(2, _PATCH, _PATCH).unfold(3, _PATCH, _PATCH).permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
        pooled = torch.arange(_SIDE**2).view(_SIDE, _SIDE).unfold(0, _POOL, _POOL).unfold(1, _POOL, _POOL).reshape(-1, _POOL**2)
        rows, count = _SIDE // _POOL, len(images)
        found = {"pixel_values": patches, "image_token_pooling": torch.cat([pooled, pooled + _SIDE**2]).repeat(count, 1)}
        return t.BatchFeature(found | {"image_num_crops": torch.full((count,), 2), "image_grids": torch.full((count, 4), rows)})


class SmallMolmo2Processor(t.ProcessorMixin):
    """What vLLM needs of the real one. The name is its own: a later transformers looks up its classes by name first."""

    attributes = ("tokenizer",)
    image_use_col_tokens = use_single_crop_start_token = True
    use_single_crop_col_tokens, use_frame_special_tokens, video_use_col_tokens = None, True, False
    video_processor = None

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.image_processor, self.chat_template = tokenizer, Molmo2ImageProcessor(), None

    @classmethod
    def from_pretrained(cls, folder: str | Path, **_options) -> "SmallMolmo2Processor":
        return cls(t.AutoTokenizer.from_pretrained(folder))

    def __call__(self, text: str = "", images: list | None = None, videos: None = None, **_options) -> t.BatchFeature:
        found = {"input_ids": torch.tensor([self.tokenizer.encode(text or "")])}
        return t.BatchFeature(found | (dict(self.image_processor(images)) if images else {}))


t.AutoConfig.register("molmo2", Molmo2Config, exist_ok=True)
t.AutoProcessor.register(Molmo2Config, SmallMolmo2Processor, exist_ok=True)


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a checkpoint's weights, by their names."""
    text, vision, adapter = (SimpleNamespace(**part) for part in (_TEXT_OF_MOLMO2, _VISION, _ADAPTER))
    hidden, qkv = text.hidden_size, (text.num_attention_heads + 2 * text.num_key_value_heads) * text.head_dim
    wide, pooled = vision.hidden_size, vision.hidden_size * len(adapter.vit_layers)
    found: dict[str, tuple[int, ...]] = {
        "model.transformer.wte.embedding": (text.vocab_size, hidden),
        "model.transformer.wte.new_embedding": (text.additional_vocab_size, hidden),
        "model.transformer.ln_f.weight": (hidden,),
        "lm_head.weight": (text.vocab_size, hidden),
    }
    for i in range(text.num_hidden_layers):
        block = f"model.transformer.blocks.{i}"
        found |= {f"{block}.{norm}.weight": (hidden,) for norm in ("attn_norm", "ff_norm")}
        found |= {f"{block}.self_attn.{norm}.weight": (text.head_dim,) for norm in ("q_norm", "k_norm")}
        found |= {f"{block}.self_attn.att_proj.weight": (qkv, hidden), f"{block}.self_attn.attn_out.weight": (hidden, hidden)}
        found |= {f"{block}.mlp.ff_proj.weight": (2 * text.intermediate_size, hidden)}
        found |= {f"{block}.mlp.ff_out.weight": (hidden, text.intermediate_size)}
    backbone = "model.vision_backbone"
    linear = {"image_vit.patch_embedding": (wide, 3 * vision.image_patch_size**2)}
    norms = []
    for i in range(vision.num_hidden_layers):
        block = f"image_vit.transformer.resblocks.{i}"
        linear |= {f"{block}.attention.{name}": (wide, wide) for name in ("wq", "wk", "wv", "wo")}
        linear |= {f"{block}.feed_forward.w1": (vision.intermediate_size, wide)}
        linear |= {f"{block}.feed_forward.w2": (wide, vision.intermediate_size)}
        norms += [f"{block}.{norm}" for norm in ("attention_norm", "ffn_norm")]
    linear |= {f"image_pooling_2d.{name}": (wide, pooled) for name in ("wq", "wk", "wv")} | {"image_pooling_2d.wo": (wide, wide)}
    found |= {f"{backbone}.{name}.weight": shape for name, shape in linear.items()}
    found |= {f"{backbone}.{name}.bias": (shape[0],) for name, shape in linear.items()}
    found |= {f"{backbone}.{name}.{kind}": (wide,) for name in norms for kind in ("weight", "bias")}
    found |= {f"{backbone}.image_projector.{name}.weight": (adapter.intermediate_size, wide) for name in ("w1", "w3")}
    found[f"{backbone}.image_projector.w2.weight"] = (adapter.text_hidden_size, adapter.intermediate_size)
    found[f"{backbone}.image_vit.positional_embedding"] = (vision.image_num_pos, wide)
    return found


def write_config(folder: Path) -> None:
    """Writes the files beside the weights and the tokenizer."""
    Molmo2Config(architectures=["Molmo2ForConditionalGeneration"], dtype="float16").save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "SmallMolmo2Processor"}))


class Molmo2Reference:
    """The model in float32, of a folder. Images go through `features`, all else is Qwen3."""

    def __init__(self, folder: Path) -> None:
        state = {key: x.float() for key, x in load_file(folder / "model.safetensors").items()}
        self.name_or_path, self.config = str(folder), Molmo2Config()
        self._state = {key.removeprefix("model.vision_backbone."): x for key, x in state.items() if "vision_backbone" in key}
        self._language = t.Qwen3ForCausalLM._from_config(
            t.Qwen3Config(**_TEXT, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False),
            attn_implementation="eager", dtype=torch.float32,
        )  # fmt: skip
        self._embeddings = torch.cat([state["model.transformer.wte.embedding"], state["model.transformer.wte.new_embedding"]])
        heads, kv_heads, width = _TEXT["num_attention_heads"], _TEXT["num_key_value_heads"], _TEXT["head_dim"]
        qwen = {"model.embed_tokens.weight": state["model.transformer.wte.embedding"], "lm_head.weight": state["lm_head.weight"]}
        qwen |= {"model.norm.weight": state["model.transformer.ln_f.weight"]}
        for i in range(_TEXT["num_hidden_layers"]):
            block, layer = f"model.transformer.blocks.{i}", f"model.layers.{i}"
            parts = state[f"{block}.self_attn.att_proj.weight"].split([heads * width, kv_heads * width, kv_heads * width])
            up, gate = state[f"{block}.mlp.ff_proj.weight"].chunk(2)
            qwen |= {f"{layer}.self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts)}
            qwen |= {f"{layer}.self_attn.{name}.weight": state[f"{block}.self_attn.{name}.weight"] for name in ("q_norm", "k_norm")}
            qwen |= {f"{layer}.mlp.up_proj.weight": up, f"{layer}.mlp.gate_proj.weight": gate}
            names = {"self_attn.attn_out": "self_attn.o_proj", "mlp.ff_out": "mlp.down_proj", "attn_norm": "input_layernorm",
                     "ff_norm": "post_attention_layernorm"}  # fmt: skip
            qwen |= {f"{layer}.{in_qwen}.weight": state[f"{block}.{in_molmo}.weight"] for in_molmo, in_qwen in names.items()}
        self._language.load_state_dict(qwen)

    def to(self, device: str) -> "Molmo2Reference":
        self._state = {key: x.to(device) for key, x in self._state.items()}
        self._embeddings, self._language = self._embeddings.to(device), self._language.to(device).eval()
        return self

    def eval(self) -> "Molmo2Reference":
        return self

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._state[f"{name}.weight"], self._state.get(f"{name}.bias"))

    def _attend(self, name: str, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Attends by a vision layer's or the adapter's weights, which have the same heads. Returns (entries, queries, hidden)."""

        def heads(weight: str, x: torch.Tensor) -> torch.Tensor:
            return self._linear(f"{name}.{weight}", x).unflatten(-1, (-1, _VISION["head_dim"])).transpose(1, 2)

        q, k, v = heads("wq", queries), heads("wk", keys), heads("wv", keys)
        p = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return self._linear(f"{name}.wo", (p @ v).transpose(1, 2).flatten(2))

    def features(self, pixel_values: torch.Tensor, pooling: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of images' tokens, (tokens, hidden). pooling: of each, indices of its patches among those of its image."""
        state, hidden = self._state, []
        x = self._linear("image_vit.patch_embedding", pixel_values) + state["image_vit.positional_embedding"]
        for i in range(_VISION["num_hidden_layers"]):
            block = f"image_vit.transformer.resblocks.{i}"

            def norm(name: str, x: torch.Tensor, block: str = block) -> torch.Tensor:
                return F.layer_norm(x, x.shape[-1:], state[f"{block}.{name}.weight"], state[f"{block}.{name}.bias"], 1e-6)

            y = norm("attention_norm", x)
            x = x + self._attend(f"{block}.attention", y, y)
            y = F.gelu(self._linear(f"{block}.feed_forward.w1", norm("ffn_norm", x)), approximate="tanh")
            x = x + self._linear(f"{block}.feed_forward.w2", y)
            hidden.append(x)
        # two layers' outputs beside each other, then both crops of an image in a row: (images, 2 * patches, 2 * hidden)
        of_images = torch.cat([hidden[i] for i in _ADAPTER["vit_layers"]], -1).unflatten(0, (-1, 2)).flatten(1, 2)
        pooling = pooling.view(len(of_images), -1, _POOL**2)
        patches = torch.cat([image[index] for image, index in zip(of_images, pooling)])
        # a token's query is the mean of its four patches, which are the keys
        pooled = self._attend("image_pooling_2d", patches.mean(1, keepdim=True), patches)[:, 0]
        gated = F.silu(self._linear("image_projector.w1", pooled)) * self._linear("image_projector.w3", pooled)
        return self._linear("image_projector.w2", gated)

    def __call__(self, ids, use_cache, attention_mask, pixel_values, image_token_pooling, **_others) -> SimpleNamespace:
        """Returns the logits, as transformers' models do. attention_mask: reference.py's, in which an image's tokens see each other."""
        embeddings = self._embeddings[ids]
        embeddings[ids == self.config.image_patch_id] = self.features(pixel_values, image_token_pooling)
        return self._language(inputs_embeds=embeddings, attention_mask=attention_mask, use_cache=use_cache)
