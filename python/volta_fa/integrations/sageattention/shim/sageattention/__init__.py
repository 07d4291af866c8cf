"""SageAttention 2's package, made of volta_fa, for programs that import sageattention. `volta_fa.install_sageattention_shim()` puts this
folder's parent on sys.path; tools/sageattention_shim installs it with pip. See volta_fa's docs/guides/fast.md."""

import importlib

from volta_fa.integrations.sageattention import *
from volta_fa.integrations.sageattention import __all__ as __all__
from volta_fa.integrations.stand_in import provide_submodules

provide_submodules({"sageattention.core": "volta_fa.integrations.sageattention"})
importlib.import_module("sageattention.core")  # programs that import the package alone use it
