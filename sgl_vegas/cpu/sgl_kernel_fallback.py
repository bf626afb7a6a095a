"""A stand-in for `sgl_kernel` on machines without a GPU.

SGLang's CPU path imports `sgl_kernel` and calls a few of its operators. The published package
holds GPU code only, so it can't be imported there. This module has those operators in torch, and
answers every other name with an object that says what is missing when it is called.

Nothing is registered under `torch.ops.sgl_kernel`: SGLang looks there to see whether a CPU build
with AMX kernels is installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import NoReturn

from sgl_vegas.cpu import operators

PACKAGE = "sgl_kernel"


class MissingOperator:
    """Takes the place of an operator, class or submodule that the fallback doesn't have.

    Importing it and reading its attributes work, because SGLang imports many operators that it
    never calls on a CPU. Calling it raises `NotImplementedError`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{self._name} was called, which needs a GPU and the {PACKAGE} build for it (or, for "
            f"operators that have a CPU version, the build for Intel AMX). sgl_vegas' fallback "
            f"for CPUs doesn't have this operator."
        )

    def __getattr__(self, name: str) -> MissingOperator:
        # Python itself probes objects for special names; those must stay absent.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        child = MissingOperator(f"{self._name}.{name}")
        setattr(self, name, child)
        return child

    def __repr__(self) -> str:
        return f"<missing operator {self._name}>"


class FallbackModule(ModuleType):
    """The package `sgl_kernel`, or any submodule of it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in operators.OPERATORS:
            return operators.OPERATORS[name]
        missing = MissingOperator(f"{self.__name__}.{name}")
        # Kept, so that a name is the same object each time, whoever imports it.
        setattr(self, name, missing)
        return missing


class FallbackFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes `sgl_kernel` and whatever submodule of it is asked for."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        # A package, so that modules below it can be imported: is_package gives it a __path__.
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return FallbackModule(spec.name, __doc__)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are made when they are asked for."""


def install() -> None:
    """Make `import sgl_kernel` give the fallback from now on. Safe to call again."""
    if not any(isinstance(finder, FallbackFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, FallbackFinder())
    if isinstance(sys.modules.get(PACKAGE), FallbackModule):
        return
    # A failed import of the real package leaves some of its submodules behind.
    for name in [n for n in sys.modules if n == PACKAGE or n.startswith(PACKAGE + ".")]:
        del sys.modules[name]
    importlib.import_module(PACKAGE)
