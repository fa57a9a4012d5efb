"""A stub of `sgl_kernel`, SGLang's compiled kernels, which cannot be imported on a machine without CUDA.

    PYTHONPATH=tests/rollout/stand_ins/kernels SGLANG_USE_CPU_ENGINE=1 python -m sglang.launch_server --device cpu \
        --attention-backend torch_native --model-path ...

SGLang imports many names from it and, run like this, calls none. Every name and submodule exists here, and calling
any of them raises NotImplementedError: what the tests see is computed by SGLang and PyTorch alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.3.21"  # SGLang asks for a minimum
__path__: list[str] = []


class Kernel:
    """A name that may be imported and not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} is a stub for tests without CUDA: it must not be called")

    def __getattr__(self, name: str) -> Kernel:
        return kernel(self.__name__, name)


def kernel(parent: str, name: str) -> Kernel:
    if name.startswith("__"):  # what Python itself looks for
        raise AttributeError(name)
    return Kernel(f"{parent}.{name}")


class Submodule(ModuleType):
    def __getattr__(self, name: str) -> Kernel:
        return kernel(self.__name__, name)


class Submodules(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> Submodule:
        return Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


sys.meta_path.insert(0, Submodules())


def __getattr__(name: str) -> Kernel:
    return kernel(__name__, name)
