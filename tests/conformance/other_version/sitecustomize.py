"""Makes an engine believe that it is another version: a Python that has this folder on PYTHONPATH runs this file first.

CKPT_ENGINE_TEST_VERSION_MODULE names the module in which the engine keeps its version ("vllm._version"). It is there
already when the engine imports it, with a version that does not exist. Everything else of the engine is genuine. Then
the next sitecustomize on the path runs, as it would have without this one.
"""

import importlib.machinery
import importlib.util
import os
import sys
import types

name = os.environ.get("CKPT_ENGINE_TEST_VERSION_MODULE")
if name:
    module = types.ModuleType(name)
    module.__version__ = module.version = "99.1.0"
    module.__version_tuple__ = module.version_tuple = (99, 1, 0)
    sys.modules[name] = module

here = os.path.dirname(os.path.abspath(__file__))
spec = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if os.path.abspath(path) != here]
)
if spec is not None and spec.loader is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
