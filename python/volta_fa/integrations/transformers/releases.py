"""The installed release of transformers, and the names under which it knows volta_fa. Importing it fails without a usable transformers."""

from ...version import __version__

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"volta_fa {__version__} needs transformers 4.57 or 5.x ({error}): run `pip install 'transformers>=4.57,<6'`"
    ) from error

#: The value of `attn_implementation`.
NAME = "volta_fa"
#: The name that continuous batching sets in its place while it generates, up to transformers 5.17.
PAGED_NAME = f"paged|{NAME}"
#: The installed release.
transformers_version: str = transformers.__version__
#: Major and minor number of the installed transformers.
VERSION = tuple(int(part) for part in transformers_version.split(".")[:2])
