"""The training configuration: every key with its type, default and meaning; read from YAML and ``key=value`` words.

``nextn train --help-config`` prints this table. Unknown keys and wrong types are refused with the nearest key or the
values that exist.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nextn.errors import NextnError


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _as_list(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _off(value: Any) -> Any:
    """YAML reads the bare word off as false."""
    return "off" if value is False else value


Whole = Annotated[int, BeforeValidator(_no_bool)]
Real = Annotated[float, BeforeValidator(_no_bool)]
MOST = 10**9
"""Of what is counted: more is a slip of the hand. Whether rows fit into memory is asked in `room`."""
STARTS = ("native", "scratch")
"""Of `init`, beside paths."""
LossKind = Literal["ce", "kl", "lk", "lk_log", "tv"]
ONE_ID = (
    "The draft vocabulary has one id, whose probability is 1 whatever the head says: "
    "the loss does not depend on the head.",
    "Give draft_vocab at least two ids, or `full`.",
)


class TrainConfig(BaseModel):
    """Everything that a run depends on."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    model: str | None = Field(
        None, description="Target: checkpoint folder or hub repository. Default: the embedded model."
    )
    data: Annotated[list[str], BeforeValidator(_as_list)] = Field(
        [],
        description="Training files (.jsonl, .jsonl.gz): a path or a list, [a.jsonl,b.jsonl]. Not needed with `cache`.",
    )
    output: str = Field(
        "nextn-head",
        description="Head folder to write; `merge`, `--head` and `inspect` take it. Checkpoints and logs lie inside.",
    )
    merge: str | None = Field(None, description="Also write the target with the trained head merged in to this folder.")
    init: str = Field(
        "native",
        description="Where the head starts: native (the target's own), scratch, or the path of a head or checkpoint.",
    )
    cache: str | None = Field(
        None, description="Train from hidden states that `nextn cache` wrote to this folder, without a target pass."
    )
    steps: Whole = Field(300, ge=1, le=MOST, description="Optimiser steps.")
    unroll: Whole = Field(3, ge=1, le=8, description="Draft steps to train, each as the engine will run it.")
    loss: LossKind = Field(
        "kl",
        description="ce (data tokens), kl (target's distribution), lk (KL and total variation blended by acceptance), "
        "lk_log (-log acceptance), tv (1 - acceptance).",
    )
    loss_weights: list[Real] | None = Field(
        None, description="Weight of each draft step's loss, `unroll` numbers, e.g. [1,0.8,0.6]. Default: 0.8^(k-1)."
    )
    lk_eta: Real = Field(
        3.0, ge=0, description="lk: KL has the weight exp(-lk_eta * acceptance), total variation the rest."
    )
    draft_vocab: Whole | str | None = Field(
        None,
        description="Train over the N most frequent ids of the data, over those in a draft_vocab.json, or `full`: all. "
        "Default: those that the head of `init` drafts already, if it names any.",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon: orthogonalised momentum for matrices; norms, biases and stacked experts keep AdamW.",
    )
    lr: Real = Field(3e-4, gt=0, le=100, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Learning rate after the warm-up.")
    warmup: Real = Field(0.05, ge=0, le=1, description="Share of the steps with a rising learning rate.")
    weight_decay: Real = Field(0.0, ge=0, description="Of matrices.")
    clip: Real = Field(1.0, gt=0, description="Largest norm of the gradient.")
    batch_tokens: Whole = Field(
        512, ge=8, le=MOST, description="Tokens of a packed batch, one forward of one process; `max_length` or more."
    )
    max_length: Whole = Field(512, ge=4, le=MOST, description="Tokens of a document at most; longer ones are cut.")
    accumulation: Whole | None = Field(
        None,
        ge=1,
        le=MOST,
        description="Packed batches an optimiser step, over all processes together. Default: one a process.",
    )
    seed: Whole = Field(0, ge=0, lt=2**63, description="Order of the data, and weights that start from scratch.")
    target_dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = Field(
        "auto", description="Of the frozen target. auto: float32 on a CPU, the checkpoint's own on a GPU."
    )
    autocast: Annotated[Literal["auto", "bfloat16", "off"], BeforeValidator(_off)] = Field(
        "auto", description="Arithmetic of the head, whose weights are float32. auto: bfloat16 on a GPU, off on a CPU."
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1.")
    eval: str | None = Field(None, description="Held-out file, same formats as `data`.")
    eval_every: Whole = Field(
        100, ge=1, le=MOST, description="Steps between evaluations; one more precedes the first step."
    )
    eval_tokens: Whole = Field(16384, ge=8, le=MOST, description="Tokens of an evaluation.")
    eval_draft_tokens: Whole = Field(3, ge=1, le=8, description="Draft length K that accept length is reported for.")
    save: Whole = Field(100, ge=1, le=MOST, description="Steps between checkpoints.")
    keep: Whole = Field(
        2, ge=1, le=MOST, description="Newest checkpoints to keep, besides the one that is accepted best."
    )
    keep_best: bool = Field(
        True,
        description="With `eval`: export the step accepted best, or nothing where none beats the head that was there "
        "before, drafting from the same ids. false: export the last step.",
    )
    resume: bool = Field(True, description="Continue from the newest checkpoint in `output`. false: refuse if one is.")
    log_every: Whole = Field(10, ge=1, le=MOST, description="Steps between lines of the log.")
    wandb: str | None = Field(None, description="Project to log to, where Weights & Biases is installed.")

    @property
    def step_weights(self) -> list[float]:
        """One weight a draft step; they sum to 1."""
        given = self.loss_weights or [0.8**k for k in range(self.unroll)]
        return [w / sum(given) for w in given]


RUN_ONLY = frozenset(
    {"output", "merge", "steps", "save", "keep", "resume", "log_every", "wandb", "eval", "eval_every", "device"}
    | {"eval_tokens", "eval_draft_tokens", "keep_best", "data"}
)
"""Keys that may change between a run and its continuation; of the data it is the content that must not."""


def load_config(path: Path | None, words: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and ``key=value`` words over it.

    Raises:
        NextnError: unreadable file, unknown key, wrong type, or keys that contradict each other.
    """
    values = _read(path) if path is not None else {}
    given: set[str] = set()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise NextnError(
                f"{word[:80]!r} is no key=value.", "Write one YAML file first, then overrides, e.g. steps=200."
            )
        key = key.strip()
        if key in given:
            raise NextnError(f"{key[:60]!r} is given twice.", "Keep one.")
        given.add(key)
        values[key] = _parse(key, text)
    for key in values:
        _refuse_unknown(key)
    try:
        config = TrainConfig(**values)
    except ValidationError as error:
        raise _explain(error, values) from None
    _check(config)
    return config


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8-sig")
        tree = yaml.compose(text, yaml.SafeLoader)
        loaded = yaml.safe_load(text)
    except OSError as error:
        raise NextnError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = f" (line {line + 1})" if line is not None else ""
        raise NextnError(f"{path} is not valid YAML{where}.", "Write one `key: value` a line.") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise NextnError(f"{path} holds no keys.", "Write one `key: value` a line.")
    assert isinstance(tree, yaml.MappingNode)
    lines: dict[str, int] = {}
    for node, _ in tree.value:
        line = node.start_mark.line + 1
        if node.value in lines:
            raise NextnError(
                f"{path} gives {str(node.value)[:60]!r} twice (lines {lines[node.value]} and {line}).", "Keep one."
            )
        lines[node.value] = line
    return {str(key): value for key, value in loaded.items()}


def _parse(key: str, text: str) -> Any:
    """A word's value as YAML reads it; the word itself where YAML cannot, or sees no text where the key is text."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    wants_text = key in TrainConfig.model_fields and _kind(key) == "text"
    return text if wants_text and not isinstance(value, str | None) else value


def _refuse_unknown(key: str) -> None:
    known = list(TrainConfig.model_fields)
    if key in known:
        return
    near = difflib.get_close_matches(key, known, 1, 0.5)
    hint = f"Did you mean `{near[0]}`? " if near else ""
    raise NextnError(f"There is no key {key[:60]!r}.", f"{hint}`nextn train --help-config` lists the keys.")


def _explain(error: ValidationError, values: Mapping[str, Any]) -> NextnError:
    first = error.errors()[0]
    key = str(first["loc"][0])
    choices = _choices(key)
    given = values.get(key)
    if given is None or isinstance(given, bool):
        given = _SPELLED[given]
    if choices:
        near = difflib.get_close_matches(str(given), choices, 1, 0.5)
        hint = f"Did you mean {near[0]}? " if near else ""
        return NextnError(f"{key} is {str(given)[:60]!r}.", f"{hint}Choose {', '.join(choices)}.")
    kind = _kind(key)
    exceeded = first["type"] in ("less_than", "less_than_equal", "int_parsing_size")
    article = "a " if kind.startswith(("whole number", "number")) and kind != "numbers" else ""
    return NextnError(
        f"{key} is {str(given)[:60]!r}.",
        f"Give {article}{kind}{_bounds(key, exceeded=exceeded)}. {TrainConfig.model_fields[key].description}",
    )


_SPELLED = {None: "null", True: "true", False: "false"}
"""As YAML spells them."""


def _choices(key: str) -> list[str]:
    values = get_args(TrainConfig.model_fields[key].annotation)
    return [v for v in values if isinstance(v, str)]


def _check(config: TrainConfig) -> None:
    if not config.data and config.cache is None:
        raise NextnError("No training data is named.", "Give data=FILE.jsonl, or cache=FOLDER.")
    near = difflib.get_close_matches(config.init.lower(), STARTS, 1, 0.6)
    if near and config.init not in STARTS and "/" not in config.init and not Path(config.init).exists():
        raise NextnError(
            f"init is {config.init!r}, and there is no folder of that name.",
            f"Did you mean {near[0]}? Give native, scratch, or the path of a head or checkpoint.",
        )
    weights = config.loss_weights
    if weights is not None and len(weights) != config.unroll:
        raise NextnError(
            f"loss_weights has {len(weights)} numbers for unroll = {config.unroll}.", "Give one weight a draft step."
        )
    if weights is not None and (min(weights) < 0 or sum(weights) <= 0):
        raise NextnError("loss_weights must not be negative, nor all zero.", "Give one weight a draft step.")
    if config.draft_vocab == 1:
        raise NextnError(*ONE_ID)
    if isinstance(config.draft_vocab, int) and config.draft_vocab < 1:
        raise NextnError(f"draft_vocab is {config.draft_vocab}.", "Give a number of ids, e.g. 32768.")
    if config.max_length > config.batch_tokens:
        raise NextnError(
            f"max_length {config.max_length} exceeds batch_tokens {config.batch_tokens}.",
            "A document must fit one packed batch: raise batch_tokens or lower max_length.",
        )
    if Path(config.output).resolve() == Path(config.merge or "").resolve() and config.merge:
        raise NextnError("output and merge name the same folder.", "Give two folders.")


def describe() -> str:
    """The table that ``--help-config`` prints."""
    lines = ["Keys of a training configuration (YAML, or key=value on the command line):", ""]
    for name, info in TrainConfig.model_fields.items():
        choices = _choices(name)
        default = info.get_default()
        shown = "none" if default is None or default == [] else str(default).lower()
        kind = " | ".join(choices) if choices else _kind(name) + _bounds(name)
        lines += [f"{name} ({kind}; default {shown})", f"    {info.description}"]
    return "\n".join(lines)


def _kind(name: str) -> str:
    if name in ("data", "loss_weights"):
        return "paths" if name == "data" else "numbers"
    types = _plain_types(TrainConfig.model_fields[name].annotation)
    words = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return " or ".join(word for kind, word in words.items() if kind in types)


def _bounds(name: str, *, exceeded: bool = False) -> str:
    """Which numbers a key takes; upper ends that nobody comes near only where one is exceeded."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{word} {getattr(bound, kind):,}"
        for bound in TrainConfig.model_fields[name].metadata
        for kind, word in words.items()
        if hasattr(bound, kind) and (exceeded or getattr(bound, kind) < MOST)
    ]
    return f" {' and '.join(found)}" if found else ""


def _plain_types(annotation: Any) -> set[Any]:
    """The plain types inside an annotation: ``Annotated[int, ...] | str`` holds int and str."""
    if getattr(annotation, "__metadata__", None):
        return _plain_types(annotation.__origin__)
    inner = get_args(annotation)
    return set().union(*map(_plain_types, inner)) if inner else {annotation}
