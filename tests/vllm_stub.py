"""A stub of vLLM: the classes and functions that volta_fa.vllm uses, with the names and signatures that vLLM 0.19.1 and 0.33.0 share,
without behavior. vllm_server.py installs it in sys.modules for test_vllm*.py, unless they run with a real vLLM; test_vllm_releases.py
compares it with that. vLLM's documentation describes the classes; docstrings here say only what is special to the stub."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import sys
import types
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class MultipleOf:
    def __init__(self, base: int):
        self.base = base


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class AttentionMetadata:
    pass


@dataclasses.dataclass
class CommonAttentionMetadata:
    """What all layers share about a step. The first nine fields are at the same positions in all releases."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    # fields of releases from 0.26 on, which have them at other positions
    seq_lens_cpu_upper_bound: Any = dataclasses.field(default=None, init=False)
    mm_req_doc_ranges: Any = dataclasses.field(default=None, init=False)


class AttentionBackend(ABC):
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar = ["auto"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes():
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @classmethod
    def get_supported_head_sizes(cls):
        raise NotImplementedError

    @classmethod
    def supports_compute_capability(cls, capability):
        raise NotImplementedError

    @classmethod
    def supports_attn_type(cls, attn_type):
        raise NotImplementedError

    @classmethod
    def supports_sink(cls):
        raise NotImplementedError

    @classmethod
    def supports_mm_prefix(cls):
        return False


class AttentionMetadataBuilder(ABC):
    _cudagraph_support = AttentionCGSupport.NEVER

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device

    def __class_getitem__(cls, _):
        return cls

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


class AttentionImpl(ABC):
    def __class_getitem__(cls, _):
        return cls

    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
        logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None,
    ): ...  # fmt: skip

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...  # fmt: skip


class MLAAttentionImpl(ABC):
    def __class_getitem__(cls, _):
        return cls

    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
        kv_sharing_target_layer_name, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, qk_head_dim, v_head_dim, kv_b_proj,
        indexer=None, q_pad_num_heads=None,
    ): ...  # fmt: skip

    @abstractmethod
    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer): ...

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale):
        raise NotImplementedError


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def get_path(self):
        return _OVERRIDES.get(self, self.value)

    def get_class(self):
        module, _, name = self.get_path().rpartition(".")
        return getattr(__import__(module, fromlist=[name]), name)


#: Paths of the classes that plugins registered.
_OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend, class_path=None, is_mamba=False):
    _OVERRIDES[backend] = class_path
    return lambda cls: cls


def get_kv_cache_layout():
    return "NHD"


#: vLLM's modules, and what the stub has of each.
MODULES = {
    "vllm.v1.attention.backend": [
        AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder, AttentionType,
        CommonAttentionMetadata, MLAAttentionImpl, MultipleOf,
    ],
    "vllm.v1.attention.backends.registry": [AttentionBackendEnum, register_backend],
    "vllm.v1.attention.backends.utils": [get_kv_cache_layout],
    "vllm.platforms.interface": [DeviceCapability],
}  # fmt: skip


def install() -> None:
    """Puts the modules and their parent packages into sys.modules."""
    for name, members in MODULES.items():
        for package in itertools.accumulate(name.split("."), "{}.{}".format):
            module = sys.modules.setdefault(package, types.ModuleType(package))
            module.__path__ = []
        for member in members:
            setattr(sys.modules[name], member.__name__, member)
