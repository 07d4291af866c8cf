"""The two versions that must agree with the rest of the repository (tests/test_package.py compares them)."""

__version__ = "0.1.0"

#: The torch release that the native library is built against, and the only one it loads into.
TORCH_VERSION = "2.11.0"
