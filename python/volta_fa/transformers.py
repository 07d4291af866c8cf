"""Public name of `volta_fa.integrations.transformers`: importing it registers `attn_implementation="volta_fa"` with transformers."""

from .integrations.transformers import *
from .integrations.transformers import __all__ as __all__
