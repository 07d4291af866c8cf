"""flash_attn.bert_padding: volta_fa's module of that name."""

from volta_fa.bert_padding import *
from volta_fa.bert_padding import __all__ as __all__
