"""LoRA of peft on coded layers: the codes stay as they are, and the adapter is trained beside them.

peft chooses a layer's class by a list inside it and has no entry point for other kinds. So its last choice is wrapped
when peft is imported: now, or at a later import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from onegraph.integrations.hf.modules import CodedLinear

WATCHED = "peft.tuners.lora.model"


def register() -> None:
    """Once, or again without effect."""
    if WATCHED in sys.modules:
        _teach(sys.modules[WATCHED])
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(importlib.abc.MetaPathFinder):
    """Wraps peft's choice as soon as its module is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _teach(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one import's loader
        return spec


def _teach(module: Any) -> None:
    """module: peft.tuners.lora.model, whose `dispatch_default` is the last to be asked for a layer's class."""
    usual = module.dispatch_default
    if getattr(usual, "knows_coded", False):
        return
    made: list[type] = []

    def dispatch_default(target: Any, adapter_name: str, config: Any, **options: Any) -> Any:
        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        if not isinstance(base, CodedLinear):
            return usual(target, adapter_name, config=config, **options)
        made[:] = made or [_lora_class()]
        return made[0](target, adapter_name, config=config, **options)

    dispatch_default.knows_coded = True  # type: ignore[attr-defined]
    module.dispatch_default = dispatch_default


def _lora_class() -> type:
    from peft.tuners.lora.layer import Linear  # type: ignore[import-not-found, unused-ignore]

    class CodedLora(Linear):  # type: ignore[misc, valid-type, unused-ignore]
        """peft's layer around a `CodedLinear`. Merged, the base is a dense layer; unmerged, it is the codes again."""

        _coded: Any = None  # the base while it is dense

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            base = self.get_base_layer()
            if isinstance(base, CodedLinear):
                self.__dict__["_coded"] = base  # no submodule: it would be in the state dict twice
                self.base_layer = base.plain(base.dtype)
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)

        def unmerge(self) -> None:
            if self._coded is None:
                super().unmerge()
                return
            self.merged_adapters.clear()
            self.base_layer = self._coded
            self.__dict__["_coded"] = None

    return CodedLora
