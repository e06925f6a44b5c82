"""What every engine's worker does: stand in for absent packages, fill with NaN, find what is left, ask for its keys.

Imported by the worker scripts beside it, which an engine's own Python runs; it imports nothing of nextn.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

NAN_FP8 = 0x7F


class _Absent:
    """Stands for a class or function of a package that is not there; using it is an error."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("a package that is not installed was called")


class _Stub(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Absent,), {})


class _Finder:
    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.used: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        root = name.split(".")[0]
        if root not in self.names:
            return None
        self.used.add(root)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install_stubs(may_be_absent: Iterable[str]) -> _Finder:
    """Stubs for what is absent. transformers looks first, so that it does not take a stub for the real thing."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    finder = _Finder({name for name in may_be_absent if importlib.util.find_spec(name) is None})
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    return finder


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def heard(name: str) -> Iterator[_Warnings]:
    """Collects what a logger and its children warn about."""
    handler, logger = _Warnings(), logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


def fill(module: Any) -> None:
    """NaN in every floating parameter (FP8 by its NaN code), 0x5A bytes in integer ones.

    Scales of the K/V cache are left: they are made with a value of their own, and checkpoints may do without.
    """
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith((".k_scale", ".v_scale")):
                continue
            if parameter.dtype.itemsize == 1 and parameter.dtype.is_floating_point:
                parameter.view(torch.uint8).fill_(NAN_FP8)
            elif parameter.dtype.is_floating_point:
                parameter.fill_(float("nan"))
            else:
                parameter.view(torch.uint8).fill_(0x5A)


def survivors(module: Any) -> list[dict[str, Any]]:
    """Parameters that still hold what `fill` wrote, with the share of elements that do."""
    import torch

    out = []
    for name, parameter in module.named_parameters():
        if parameter.dtype.itemsize == 1 and parameter.dtype.is_floating_point:
            left = (parameter.view(torch.uint8) & 0x7F) == NAN_FP8
        elif parameter.dtype.is_floating_point:
            left = torch.isnan(parameter)
        else:
            left = parameter.view(torch.uint8) == 0x5A
            if not left.all():
                continue
        if left.any():
            share = float(left.float().mean())
            out.append({"parameter": name, "shape": list(parameter.shape), "share": round(share, 6)})
    return out


def keys_of(module: Any, left: list[dict[str, Any]], expected: dict[str, list[int]]) -> None:
    """Add ``keys`` to each survivor: the checkpoint keys that the class would have put there, tried with zeros."""
    import torch

    places = dict(module.named_parameters())
    before = {s["parameter"]: int(torch.isnan(places[s["parameter"]].float()).sum()) for s in left}
    for survivor in left:
        survivor["keys"] = []
    for key, shape in expected.items():
        try:
            module.load_weights([(key, torch.zeros(shape, dtype=torch.get_default_dtype()))])
        except Exception:
            continue
        for survivor in left:
            name = survivor["parameter"]
            now = int(torch.isnan(places[name].float()).sum())
            if now < before[name]:
                survivor["keys"].append(key)
                before[name] = now
        if not any(before.values()):
            return
