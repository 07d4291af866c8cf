"""A stub of vLLM: the classes and functions that volta_fa.vllm uses, without behavior. vllm_server.py installs it in sys.modules for
test_vllm*.py, unless they run with a real vLLM. Base classes are empty: test_methods_have_vllms_arguments compares the methods of volta_fa
with vLLM's. vLLM's documentation describes the classes."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import pkgutil
import sys
import types
from typing import Any, NamedTuple

import torch


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    """Steps that a backend can run in CUDA graphs (CG)."""

    ALWAYS = 3
    UNIFORM_BATCH = 2  # equally many queries in each request
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclasses.dataclass
class MultipleOf:
    """Block sizes: all multiples of `base` tokens."""

    base: int


class DeviceCapability(NamedTuple):
    major: int
    minor: int


@dataclasses.dataclass
class CommonAttentionMetadata:
    """What all layers share about a step of several requests (sequences). All releases have the first nine fields in this order."""

    query_start_loc: torch.Tensor  # (num_reqs + 1) int32: cu_seqlens of the queries
    query_start_loc_cpu: torch.Tensor  # the same on the host
    seq_lens: torch.Tensor  # (num_reqs) int32: tokens of each request, new ones included
    num_reqs: int
    num_actual_tokens: int  # rows of q
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor  # (num_reqs, blocks) int32
    slot_mapping: torch.Tensor  # (rows) int64: each new token's place in the cache; -1: none
    causal: Any = True  # a bool, or a tensor of one per request
    # fields of releases from 0.26 on, which have them at other positions
    seq_lens_cpu_upper_bound: Any = dataclasses.field(default=None, init=False)  # (num_reqs) on the host: no less than seq_lens
    mm_req_doc_ranges: Any = dataclasses.field(default=None, init=False)  # first and last tokens of image spans, by request


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device


AttentionBackend, AttentionImpl, AttentionMetadata, MLAAttentionImpl = (
    type(name, (), {}) for name in ("AttentionBackend", "AttentionImpl", "AttentionMetadata", "MLAAttentionImpl")
)


class AttentionBackendEnum(enum.Enum):
    CUSTOM = None

    def get_class(self):
        """Returns the class that `register_backend` set."""
        return pkgutil.resolve_name(_OVERRIDES[self])


#: Paths of the classes that plugins registered.
_OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend, class_path=None, is_mamba=False):
    """Makes the class at this path that of the backend. The result decorates a class, here without effect."""
    _OVERRIDES[backend] = class_path
    return lambda cls: cls


def get_kv_cache_layout():
    """Returns the order of a cache's dimensions: tokens (N), heads (H), headdim (D)."""
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
