"""Lists the attention of well-known models: heads, headdims, masks and the lengths that people run.

Numbers are those of the published configurations (config.json on the Hugging Face hub, or the model's paper), read on 2026-11-23.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

#: What a program does with a model.
TRAIN, FORWARD, DECODE = "training", "forward", "decode"


@dataclass(frozen=True)
class Attention:
    """Attention of a layer."""

    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int = 0  # 0: headdim
    causal: bool = True
    window: int = 0  # keys that a query sees to its left, and without `causal` to its right; 0: all
    softcap: float = 0.0
    sinks: bool = False
    latents: bool = False  # decodes from a cache of latents of this headdim, whose first `headdim_v` columns are the values

    def __post_init__(self):
        object.__setattr__(self, "headdim_v", self.headdim_v or self.headdim)


@dataclass(frozen=True)
class Row:
    """One layer's attention in one use of a model."""

    model: str
    attention: Attention
    use: str  # TRAIN, FORWARD or DECODE
    batch: int
    seqlen_q: int
    seqlen_k: int
    wave: bool = False  # a few waves of blocks stand for a larger call

    @property
    def window(self) -> int:
        """The attention's window; 0 if it hides no key."""
        return self.attention.window if self.attention.window < self.seqlen_k else 0

    def __str__(self) -> str:
        a = self.attention
        heads = f"{a.nheads}" if a.nheads == a.nheads_k else f"{a.nheads}/{a.nheads_k}"
        headdim = f"{a.headdim}" if a.headdim == a.headdim_v else f"{a.headdim}/{a.headdim_v}"
        lengths = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        counted = "heads that fill the GPU" if self.wave else f"heads {heads}"
        return f"{self.model}, {self.use}: {self.batch} x {lengths}, {counted}, headdim {headdim}"


def language_model(
    name: str, layers: dict[str, Attention], train: int = 2048, prefill: int = 4096, decode: tuple[int, int] = (8, 4096)
) -> Iterator[Row]:
    """Yields a training step, a prefill and a decode step for each kind of layer. `decode` is sequences and tokens of each."""
    for kind, attention in layers.items():
        model = f"{name}, {kind}" if kind else name
        yield Row(model, attention, TRAIN, 1, train, train)
        yield Row(model, attention, FORWARD, 1, prefill, prefill)
        yield Row(model, attention, DECODE, decode[0], 1, decode[1])


def encoder(name: str, attention: Attention, use: str, batch: int, seqlen_q: int, seqlen_k: int = 0) -> Row:
    """Returns a row of bidirectional attention. `seqlen_k` 0: self-attention."""
    return Row(name, replace(attention, causal=False), use, batch, seqlen_q, seqlen_k or seqlen_q)


def rows(sms: int) -> Iterator[Row]:
    """Yields one layer of each kind, in the uses that the model has, for a GPU of that many SMs."""
    yield from language_model("Llama 3 8B", {"": Attention(32, 8, 128)})
    yield from language_model("Qwen3 0.6B", {"": Attention(16, 8, 128)})
    yield from language_model("Qwen3 8B", {"": Attention(32, 8, 128)}, train=1024, prefill=8192)
    yield from language_model("Qwen3 32B", {"": Attention(64, 8, 128)})
    yield from language_model("Qwen3.5 9B, full attention", {"": Attention(16, 4, 256)})
    yield from language_model("Mistral 7B v0.1", {"": Attention(32, 8, 128, window=4096)}, prefill=8192, decode=(8, 8192))
    gemma2 = Attention(16, 8, 256, softcap=50.0)
    yield from language_model("Gemma 2 9B", {"global": gemma2, "local": replace(gemma2, window=4096)})
    gemma3 = Attention(8, 4, 256)
    yield from language_model("Gemma 3 4B", {"global": gemma3, "local": replace(gemma3, window=1024)})
    yield from language_model("Gemma 4 E4B", {"local": Attention(8, 2, 256, window=512)})
    gpt_oss = Attention(64, 8, 64, sinks=True)
    yield from language_model("gpt-oss 20B", {"full": gpt_oss, "sliding": replace(gpt_oss, window=128)})
    latents = Attention(16, 1, 576, headdim_v=512, latents=True)
    lite = language_model("DeepSeek V2 Lite", {"": Attention(16, 16, 192, headdim_v=128)})
    yield from (replace(row, attention=latents) if row.use == DECODE else row for row in lite)
    yield encoder("BERT base", Attention(12, 12, 64), TRAIN, 16, 512)
    modern = Attention(12, 12, 64)
    yield encoder("ModernBERT base, global", modern, TRAIN, 2, 4096)
    yield encoder("ModernBERT base, local", replace(modern, window=64), TRAIN, 2, 4096)
    yield encoder("ViT-L/14", Attention(16, 16, 64), TRAIN, 32, 257)
    yield encoder("Whisper large v3, encoder", Attention(20, 20, 64), FORWARD, 4, 1500)
    yield encoder("Stable Diffusion 1.5, 64x64", Attention(8, 8, 40), FORWARD, 2, 4096)
    yield encoder("SDXL, 64x64", Attention(10, 10, 64), FORWARD, 2, 4096)
    yield encoder("SDXL, 32x32", Attention(20, 20, 64), FORWARD, 2, 1024)
    yield encoder("SDXL, 64x64 to text", Attention(10, 10, 64), FORWARD, 2, 4096, 77)
    yield encoder("Stable Diffusion 3 medium", Attention(24, 24, 64), FORWARD, 2, 4096 + 333)
    yield encoder("FLUX.1, 1024x1024", Attention(24, 24, 128), FORWARD, 1, 4096 + 512)
    # Whole waves, at least 80 blocks of 128 queries, stand for the whole call: all blocks do the same.
    heads = -(-80 // sms) * sms // 8
    for name, keys in (("Wan 2.1 1.3B, a wave of 480p", 32760), ("HunyuanVideo, a wave of 720p", 115200 + 256)):
        yield replace(encoder(name, Attention(heads, heads, 128), FORWARD, 1, 1024, keys), wave=True)
