"""Match lists as SGLang and vLLM match them, on the module names that they build.

Sources: SGLang ``srt/layers/quantization/{utils,modelopt_quant,compressed_tensors/utils,quark/utils,auto_round,
bitsandbytes,awq/awq}.py``; vLLM ``model_executor/layers/quantization/{utils/quant_utils,utils/config_utils,
utils/gptq_utils,modelopt,auto_awq,fp8,quark/utils}.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nextn.inspect.quant.scheme import Scheme, compile_glob, compile_regex

Test = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Built:
    """A module as an engine builds it.

    Attributes:
        name: its name at runtime, e.g. ``mtp.layers.0.self_attn.qkv_proj``.
        parts: the unfused names that the engine would expand it to; empty where it is not fused.
        experts: a routed-experts module, of which `parts` are the first expert's projections.
    """

    name: str
    parts: tuple[str, ...] = ()
    experts: bool = False


class SplitError(Exception):
    """Some parts of a fused module match and others do not; engines raise."""


def exempt(engine: str, scheme: Scheme, module: Built, *, expands: bool) -> bool:
    """Whether an engine builds a module in full precision because of the scheme's lists.

    Args:
        engine: ``sglang`` or ``vllm``.
        expands: whether the model class hands the matcher its fused names.
    Raises:
        SplitError: the lists name some parts of a fused module and not others.
    """
    method = _group(scheme.method)
    texts = [r.text for r in scheme.rules if r.exempts]
    wanted = [r.text for r in scheme.rules if not r.exempts]
    if not scheme.by_default and not _included(scheme, wanted, module, method):
        return True
    if not texts:
        return False
    return MATCHERS[engine].get(method, MATCHERS[engine]["fp8"])(texts, module, expands)


def _group(method: str) -> str:
    for start in ("modelopt", "compressed-tensors", "gptq", "awq", "auto", "quark", "bitsandbytes"):
        if method.startswith(start):
            return start
    return "fp8"


def _included(scheme: Scheme, wanted: list[str], module: Built, method: str) -> bool:
    names = module.parts or (module.name,)
    if method == "auto":
        return any(module.name.startswith(text) for text in wanted)
    if method == "gptq":
        return any(text in name for text in wanted for name in names)
    return any(not r.exempts and r.matches(n) for r in scheme.rules for n in (*names, module.name))


def _over_parts(test: Test, parts: Sequence[str]) -> bool:
    results = {test(part) for part in parts}
    if len(results) == 2:
        raise SplitError
    return results == {True}


def _equal_or_regex(texts: Sequence[str], name: str) -> bool:
    for text in texts:
        if text.startswith("re:"):
            compiled = compile_regex(text[3:])
            if compiled is not None and compiled.match(name):
                return True
        elif text == name:
            return True
    return False


def _dotted(text: str, name: str) -> bool:
    return f".{text.rstrip('.')}." in f".{name}."


def _glob(text: str, name: str) -> bool:
    if not any(c in text for c in "*?["):
        return text == name
    compiled = compile_glob(text)
    return compiled is not None and compiled.match(name) is not None


# -- SGLang ---------------------------------------------------------------------------------------


def _sglang_skipped(texts: Sequence[str], module: Built, expands: bool) -> bool:
    """``is_layer_skipped``: between dots; q/k/v and gate/up are expanded whatever the model class says."""
    if module.parts and not module.experts:
        return _over_parts(lambda part: any(_dotted(t, part) for t in texts), module.parts)
    if any(_dotted(t, module.name) for t in texts):
        return True
    return module.experts and any("experts" in t and module.name in t for t in texts)


def _sglang_modelopt(texts: Sequence[str], module: Built, expands: bool) -> bool:
    """Experts are matched by the globs alone; a glob may fit the whole name or one part of it."""
    names = {module.name, module.name.removeprefix("language_model.")}
    return (not module.experts and _sglang_skipped(texts, module, expands)) or any(
        _glob(t, name) or any(_glob(t, part) for part in name.split(".")) for t in texts for name in names
    )


def _sglang_compressed(texts: Sequence[str], module: Built, expands: bool) -> bool:
    def test(name: str) -> bool:
        return _equal_or_regex(texts, name) or any(name.endswith(f".{t}") for t in texts if not t.startswith("re:"))

    if module.experts or (module.parts and expands and module.name not in texts):
        return _over_parts(test, module.parts)
    return test(module.name)


def _quark(texts: Sequence[str], module: Built, expands: bool) -> bool:
    """Both engines: exact or ``re:``, the fused name first; an excluded expert excludes the experts' module."""
    if _equal_or_regex(texts, module.name):
        return True
    if module.experts:
        return any(t.startswith(f"{module.name}.") for t in texts)
    if module.parts and expands:
        return _over_parts(lambda part: _equal_or_regex(texts, part), module.parts)
    return False


def _gptq(texts: Sequence[str], module: Built, expands: bool) -> bool:
    """Both engines: ``dynamic`` expressions against the runtime name, fused as it is."""
    for text in texts:
        compiled = compile_regex(text.removeprefix("-:")) if text.startswith("-:") else None
        if compiled is not None and compiled.match(module.name):
            return True
    return False


def _substring(texts: Sequence[str], module: Built, expands: bool) -> bool:
    return any(t in module.name for t in texts)


def _auto_round(texts: Sequence[str], module: Built, expands: bool) -> bool:
    """``get_layer_config``: exact or a whole-name expression, over the parts of a fused module."""

    def test(name: str) -> bool:
        if name in texts:
            return True
        special = (t for t in texts if any(c in t for c in "*+?^$()[]{}|\\"))
        return any((p := compile_regex(f"(?:{t})$")) is not None and p.match(name) is not None for t in special)

    if module.experts and any(t.startswith(module.name) for t in texts):
        return True
    if module.parts and not module.experts and expands:
        return _over_parts(test, module.parts)
    return test(module.name)


def _components(texts: Sequence[str], module: Built, expands: bool) -> bool:
    """bitsandbytes: a part of the name between dots, or a leading run of parts."""
    parts = module.name.split(".")
    leading = {".".join(parts[: i + 1]) for i in range(len(parts))}
    return any(t in parts or t in leading for t in texts)


# -- vLLM -----------------------------------------------------------------------------------------


def _vllm_skipped(texts: Sequence[str], module: Built, expands: bool) -> bool:
    """``is_layer_skipped`` in its exact mode; any longer entry about the experts exempts them."""
    if module.name in texts:
        return True
    if module.experts:
        return any("experts" in t and module.name in t for t in texts)
    if module.parts and expands:
        return _over_parts(lambda part: part in texts, module.parts)
    return False


def _vllm_modelopt(texts: Sequence[str], module: Built, expands: bool) -> bool:
    bare = module.name.removeprefix("language_model.")
    return _vllm_skipped(texts, module, expands) or any(
        t in module.name or t in bare or _glob(t, module.name) for t in texts
    )


def _vllm_compressed(texts: Sequence[str], module: Built, expands: bool) -> bool:
    if not module.experts and _equal_or_regex(texts, module.name):
        return True
    if module.parts and (expands or module.experts):
        return _over_parts(lambda part: _equal_or_regex(texts, part), module.parts)
    return _equal_or_regex(texts, module.name)


def _vllm_awq(texts: Sequence[str], module: Built, expands: bool) -> bool:
    if any(t in module.name for t in texts):
        return True
    if module.parts and not module.experts and expands:
        return _over_parts(lambda part: any(t in part for t in texts), module.parts)
    return False


MATCHERS: dict[str, dict[str, Callable[[Sequence[str], Built, bool], bool]]] = {
    "sglang": {
        "fp8": _sglang_skipped,
        "modelopt": _sglang_modelopt,
        "compressed-tensors": _sglang_compressed,
        "quark": _quark,
        "gptq": _gptq,
        "awq": _substring,
        "auto": _auto_round,
        "bitsandbytes": _components,
    },
    "vllm": {
        "fp8": _vllm_skipped,
        "modelopt": _vllm_modelopt,
        "compressed-tensors": _vllm_compressed,
        "quark": _quark,
        "gptq": _gptq,
        "awq": _vllm_awq,
        "auto": _auto_round,
        "bitsandbytes": _components,
    },
}
"""Engine -> method -> matcher. Methods not named keep a plain list and are matched as FP8's."""
