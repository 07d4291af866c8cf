"""The package's version. pyproject.toml reads it; it must agree with the rest of the repository (tests/test_package.py compares)."""

__version__ = "0.1.0"
