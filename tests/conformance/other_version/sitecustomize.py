"""Makes an engine believe that it is another version: a Python that has this folder on PYTHONPATH runs this file first.

CKPT_ENGINE_TEST_VERSION_MODULE names the module in which the engine keeps its version ("vllm._version"). It is there
already when the engine imports it, with a version that does not exist. Everything else of the engine is genuine. Then
the next sitecustomize on the path runs, as it would have without this one.

While the file exists that CKPT_ENGINE_TEST_BROKEN_INSTALL names, an install of made weights leaves one tensor of the
model with other values, behind its own verification: a fault that no engine at hand has.
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

broken = os.environ.get("CKPT_ENGINE_TEST_BROKEN_INSTALL")


class _Breaks:
    """Finds our module as ever, and wraps the install of made weights in it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "ckpt_engine.install.self_check":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            install = module.SelfCheck._install

            def torn(check, *arguments):
                install(check, *arguments)
                if os.path.exists(broken):
                    norms = [each for name, each in check._target.named_tensors() if "norm" in name and each.numel()]
                    norms[-1].mul_(2)

            module.SelfCheck._install = torn

        spec.loader.exec_module = exec_module
        return spec


if broken:
    sys.meta_path.insert(0, _Breaks())

here = os.path.dirname(os.path.abspath(__file__))
spec = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if os.path.abspath(path) != here]
)
if spec is not None and spec.loader is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
