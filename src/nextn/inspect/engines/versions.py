"""Engine versions: ``sglang==0.5.17`` on the command line, ranges in tables."""

from __future__ import annotations

import re

from nextn.errors import NextnError

ENGINES = ("sglang", "vllm", "transformers", "llamacpp", "tensorrt_llm", "nextn")
"""All engine keys of a report, in its order."""

SPELLINGS = {"llama.cpp": "llamacpp", "llama-cpp": "llamacpp", "tensorrt-llm": "tensorrt_llm", "trtllm": "tensorrt_llm"}

Version = tuple[int, ...]


def parse_version(text: str) -> Version:
    """``"0.5.17.post1"`` -> (0, 5, 17, 1), ``"b9180"`` -> (9180,). Numbers only; what they mean is their order."""
    return tuple(int(n) for n in re.findall(r"\d{1,9}", text)[:6])


def parse_engine(text: str) -> tuple[str, str | None]:
    """``NAME`` or ``NAME==VERSION`` from the command line.

    Raises:
        NextnError: no such engine, or a version without a number.
    """
    name, _, version = text.partition("==")
    name = name.strip().lower()
    name = SPELLINGS.get(name, name)
    start = re.match(r"[a-z_.-]+", name)
    near = SPELLINGS.get(start[0], start[0]) if start else ""
    if name not in ENGINES and near in ENGINES:
        raise NextnError(f"{text!r} names no version of {near}.", f"Write one version, as in {near}==0.5.17.")
    if name not in ENGINES:
        raise NextnError(f"{text!r} names no engine that nextn knows.", f"Choose one of {', '.join(ENGINES)}.")
    if "==" in text and not parse_version(version):
        raise NextnError(f"{text!r} names no version.", f"Write for example {name}==0.5.17.")
    return name, version.strip() or None
