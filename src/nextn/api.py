"""The Python API: `load` a checkpoint with its head, `generate` or `stream` from it.

>>> from nextn import load, generate
>>> model = load("path/to/checkpoint")
>>> generate(model, "def main():", max_tokens=64).text
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, Unpack, cast, overload

import torch

from nextn.assets import embedded_model
from nextn.checkpoint.download import local_folder
from nextn.checkpoint.draft_ids import draft_ids
from nextn.checkpoint.source import Checkpoint, open_checkpoint
from nextn.engine.admission import context_room, token_limit
from nextn.engine.auto import AutoLength
from nextn.engine.defaults import GenerationDefaults, read_defaults
from nextn.engine.device_errors import device_errors
from nextn.engine.draft_length import FixedLength
from nextn.engine.draft_vocab import calibrated_ids, checked_ids
from nextn.engine.engine import Engine
from nextn.engine.params import SamplingParams
from nextn.engine.request import Request, Running
from nextn.engine.stream import TextStream
from nextn.engine.text import Tokenizer, load_tokenizer
from nextn.errors import NextnError
from nextn.generation import Generation, Step
from nextn.models.decoder import Decoder, Drafter
from nextn.models.load import LoadReport, Progress, default_dtype, load_decoder, load_drafter
from nextn.options import (
    DecodingOptions,
    DraftVocabulary,
    GenerateOptions,
    Prompt,
    SamplingOptions,
    as_prompts,
    check_options,
    plain,
)

DRAFT_TOKENS = 3
MAX_NEW_TOKENS = 256
"""Where neither the caller nor generation_config.json says."""
DTYPE_NAMES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass
class Model:
    """A loaded checkpoint.

    Attributes:
        folder: where its files are.
        target: the decoder, its head inside unless `separate` or loaded without one.
        draft: a separately loaded draft model, None natively.
        tokenizer: None where the checkpoint ships none.
        defaults: stop ids and sampling defaults that the checkpoint declares.
        report, draft_report: what loading read and holds.
        draft_ids: the only ids that the head was trained to draft, as the file beside it says; None is all.
    """

    folder: Path
    target: Decoder
    draft: Drafter | None
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    report: LoadReport
    draft_report: LoadReport | None = None
    draft_ids: list[int] | None = None

    @property
    def has_head(self) -> bool:
        return (self.draft or self.target).mtp is not None

    @property
    def weight_bytes(self) -> int:
        """Held by target, head and, where separate, the draft model."""
        return self.report.weight_bytes + (self.draft_report.weight_bytes if self.draft_report else 0)


def load(
    source: str | Path | None = None,
    *,
    mtp: bool = True,
    separate_draft: bool = False,
    head: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load a checkpoint and its MTP head in one pass.

    Args:
        source: folder or hub repository; None is the embedded model.
        mtp: with the head. Without one in the checkpoint this is an error that says so.
        separate_draft: build the head as a second model from the same files, to compare against.
        head: take the head from this folder instead, for trying one before it is merged.
        dtype: of weights and computation; float32 on a CPU and the checkpoint's own elsewhere by default.
        device: ``cpu``, ``cuda``, ...; a GPU where there is one by default.
        revision, token, cache_dir: of the hub.
        progress: called with (bytes read, bytes in all).
    Raises:
        NextnError: nothing there, no head, quantised, incomplete or damaged weights.
    """
    for name, value in (("", source), (" as its head", head), (" as its cache_dir", cache_dir)):
        if not isinstance(value, str | Path | None):
            raise NextnError(
                f"load was given a {type(value).__name__}{name}.", "Give a folder, or a hub repository as text."
            )
    for name, flag in (("mtp", mtp), ("separate_draft", separate_draft)):
        _flag(name, flag)
    _callable("progress", progress, "two numbers: bytes read, bytes in all")
    folder = local_folder(
        source if source is not None else embedded_model(), revision=revision, token=token, cache_dir=cache_dir
    )
    checkpoint = open_checkpoint(folder)
    if separate_draft and not mtp:
        raise NextnError("A separate draft model is asked for, and mtp=False leaves the head out.", "Choose one.")
    where = _device(device)
    kind = _dtype(dtype) if dtype is not None else default_dtype(checkpoint, where)
    head_source = open_checkpoint(local_folder(head, token=token, cache_dir=cache_dir)) if head is not None else None
    draft, draft_report = None, None
    with device_errors(f"loading {_weights(checkpoint, kind)}", "Take another --device, or a --dtype of fewer bytes."):
        target, report = load_decoder(
            checkpoint,
            dtype=kind,
            device=where,
            mtp=mtp and not separate_draft,
            head=head_source,
            progress=progress,
        )
        if separate_draft:
            draft, draft_report = load_drafter(
                checkpoint, dtype=kind, device=where, head=head_source, progress=progress
            )
    drafted = draft_ids(head_source if head_source is not None else checkpoint) if mtp else None
    tokenizer = load_tokenizer(folder)
    defaults = read_defaults(
        checkpoint.config, checkpoint.json("generation_config.json"), tokenizer.eos_ids if tokenizer else ()
    )
    try:
        SamplingParams(**{"max_tokens": MAX_NEW_TOKENS, **defaults.options})
    except NextnError as error:
        raise NextnError(f"In {folder / 'generation_config.json'}, {error.what}", error.fix) from None
    return Model(folder, target, draft, tokenizer, defaults, report, draft_report, drafted)


def _weights(checkpoint: Checkpoint, dtype: torch.dtype) -> str:
    """How large a checkpoint's weights are in a dtype, for an error."""
    size = sum(prod(tensor.shape) for tensor in checkpoint.tensors.values()) * dtype.itemsize
    return f"{size / 1e9:.1f} GB of weights in {str(dtype).removeprefix('torch.')}"


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise NextnError(f"{name} is {value!r}.", "Give True or False.")


def _callable(name: str, value: object, takes: str) -> None:
    if value is not None and not callable(value):
        raise NextnError(f"{name} is of type {type(value).__name__}.", f"Give a function of {takes}.")


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        if chosen.type == "meta":
            raise RuntimeError
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError):
        raise NextnError(
            f"There is no device {str(device) or repr(device)} here.", "Use `cpu`, or `cuda` on a machine with a GPU."
        ) from None
    return chosen


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    chosen = DTYPE_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if chosen not in DTYPE_NAMES.values():
        raise NextnError(f"{dtype!r} is not a dtype that nextn decodes in.", f"Use one of {', '.join(DTYPE_NAMES)}.")
    assert isinstance(chosen, torch.dtype)
    return chosen


def sampling_params(model: Model, **options: Any) -> SamplingParams:
    """Options over the checkpoint's own defaults; where neither says, greedy decoding of MAX_NEW_TOKENS.

    Raises:
        NextnError: an option that does not exist or is out of range.
    """
    check_options(options)
    given = {name: value for name, value in options.items() if value is not None}
    merged = {"max_tokens": MAX_NEW_TOKENS, **model.defaults.options, **given}
    merged.setdefault("temperature", 0.0)
    if "max_tokens" not in given and isinstance(least := merged.get("min_tokens"), int):
        merged["max_tokens"] = max(merged["max_tokens"], least)
    return SamplingParams(**merged)


@overload
def generate(  # type: ignore[overload-overlap]
    model: Model, prompts: Prompt, **options: Unpack[GenerateOptions]
) -> Generation: ...
@overload
def generate(model: Model, prompts: Sequence[Prompt], **options: Unpack[GenerateOptions]) -> list[Generation]: ...
def generate(
    model: Model, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]
) -> Generation | list[Generation]:
    """Decode prompts together, losslessly, with the head (unless `draft_tokens` is 0).

    Args:
        model: from `load`.
        prompts: text or token ids (lists, arrays or tensors), one or several.
        options: see `GenerateOptions`, `DecodingOptions` and `SamplingOptions` in `nextn.options`.
    Returns:
        a `Generation`, or a list of them for several prompts.
    Raises:
        NextnError: bad options, an empty prompt, one longer than the context, text without a tokenizer; NaN in the
            logits of a single prompt (of several, `finish_reason` and `error` say so).
    """
    on_step: Callable[[Step], None] | None = options.pop("on_step", None)
    _callable("on_step", on_step, "one step")
    batch, single = as_prompts(prompts)
    run = Run(model, batch, **options)  # type: ignore[misc]
    for step in run:
        if on_step is not None:
            on_step(step)
    return run.results[0] if single else run.results


def frequent_vocab(model: Model, count: int, text: Path | None = None) -> list[int]:
    """The `count` most frequent ids of a calibration text, to draft from; the ids that end a text are among them.

    Args:
        text: a file of text like that to be generated; None takes the order of tokens that the checkpoint carries.
    Raises:
        NextnError: a count that does not fit the vocabulary, or nothing that says what is frequent.
    """
    return calibrated_ids(
        count,
        text=text,
        tokenizer=model.tokenizer,
        folder=model.folder,
        always=model.defaults.eos_ids,
        vocab=model.target.config.vocab,
    )


def draft_vocabulary(model: Model, asked: DraftVocabulary) -> list[int] | None:
    """The ids to draft from, ascending; None is all.

    Args:
        asked: ids, how many of the most frequent, ``full``, or None for what the head was trained to draft.
    Raises:
        NextnError: no ids, ids outside the vocabulary, another word than ``full``, and as `frequent_vocab`.
    """
    asked = plain(asked)
    known = (
        asked is None
        or asked == "full"
        or (isinstance(asked, int | Iterable) and not isinstance(asked, str | bytes | bool))
    )
    if not known:
        raise NextnError(f"draft_vocab is {repr(asked)[:40]}.", "Give ids, how many, or 'full'.")
    if isinstance(asked, str) or (asked is None and model.draft_ids is None):
        return None
    ids = frequent_vocab(model, asked) if isinstance(asked, int) else asked if asked is not None else model.draft_ids
    assert ids is not None
    return checked_ids(ids, model.target.config.vocab)


def stream(model: Model, prompt: Prompt, **options: Unpack[DecodingOptions]) -> Iterator[Step]:
    """Decode one prompt and yield what each forward gave; options as in `generate`. Bad options are refused at once."""
    batch, single = as_prompts(prompt)
    if not single:
        raise NextnError("stream takes one prompt.", "Use generate with on_step for several.")
    return iter(Run(model, batch, **options))


class Run:
    """One decoding of several prompts: iterate over it for steps, then read `results`.

    Args:
        model, prompts, options: as in `generate`; `options_each` gives each prompt its own options instead.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Prompt],
        *,
        draft_tokens: int | Literal["auto"] | None = None,
        draft_vocab: DraftVocabulary = None,
        chunk: int | None = None,
        exact: bool = False,
        options_each: Sequence[Mapping[str, Any]] | None = None,
        progress: Progress | None = None,
        **options: Unpack[SamplingOptions],
    ) -> None:
        if draft_tokens is None:
            draft_tokens = DRAFT_TOKENS if model.has_head else 0
        if draft_tokens != "auto" and (isinstance(draft_tokens, bool) or not isinstance(draft_tokens, int)):
            raise NextnError(f"draft_tokens is {draft_tokens!r}.", "Give a whole number from 0 to 8, or 'auto'.")
        _flag("exact", exact)
        _callable("progress", progress, "two numbers: prompt positions done, in all")
        self.model, self.progress = model, progress
        lengths = AutoLength() if draft_tokens == "auto" else FixedLength(draft_tokens)
        vocab = draft_vocabulary(model, draft_vocab) if draft_tokens else None
        self.engine = Engine(
            model.target, draft=model.draft, draft_tokens=lengths, draft_vocab=vocab, chunk=chunk, exact=exact
        )
        shared = cast(Mapping[str, Any], options)
        self.requests = [
            self._request(p, shared if options_each is None else options_each[i]) for i, p in enumerate(prompts)
        ]
        if draft_tokens == "auto" and any(r.params.seed is not None and not r.params.greedy for r in self.requests):
            raise NextnError(
                "A seed (`--seed`) cannot make sampling repeatable with draft_tokens auto, which follows the clock.",
                "Give a number of draft tokens (`--draft-tokens`), or leave the seed out.",
            )
        self.results: list[Generation] = []

    def _request(self, prompt: Prompt, options: Mapping[str, Any]) -> Request:
        params = sampling_params(self.model, **options)
        tokenizer = self.model.tokenizer
        if isinstance(prompt, str):
            if tokenizer is None:
                raise NextnError(
                    f"{self.model.folder} ships no tokenizer, so text cannot be encoded.",
                    "Give token ids (`--prompt-ids 1,2,3` on the command line).",
                )
            ids: Sequence[int] = tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        config = self.model.target.config
        context_room(ids, config)
        text = TextStream(tokenizer, prompt_ids=ids, stop=params.stop, min_tokens=params.min_tokens)
        request = Request(ids, params, frozenset(self.model.defaults.eos_ids), text)
        token_limit(request, config)
        return request

    def __iter__(self) -> Iterator[Step]:
        started = time.perf_counter()
        sequences: dict[int, Running] = {}
        ended: dict[int, float] = {}
        for news in self.engine.rounds(self.requests, progress=self.progress):
            now = time.perf_counter() - started
            for s, update in news:
                if s.error is not None and len(self.requests) == 1:
                    raise s.error
                sequences[s.index] = s
                if s.finish is not None:
                    ended[s.index] = now
                yield Step(s.index, update.tokens, update.text, update.round)
        self.results = [
            self._result(sequences[i], ended.get(i, time.perf_counter() - started)) for i in range(len(self.requests))
        ]

    def _result(self, s: Running, seconds: float) -> Generation:
        verified = [r for r in s.rounds if r.drafts]
        widths = [len(r.drafts) for r in verified]
        stream = s.request.stream
        return Generation(
            text=stream.text if stream is not None else None,
            tokens=s.tokens,
            prompt_tokens=len(s.request.prompt),
            rounds=len(verified),
            drafted=sum(widths),
            accepted=sum(r.accepted for r in s.rounds),
            acceptance=[
                sum(r.accepted > i for r in verified) / sum(width > i for width in widths)
                for i in range(max(widths, default=0))
            ],
            seconds=seconds,
            prefill_seconds=self.engine.stats.prefill_seconds,
            finish_reason=s.finish,
            error=str(s.error) if s.error is not None else None,
            draft_rounds=s.rounds,
            logprobs=s.logprobs,
        )


def memory(model: Model, run: Run) -> dict[str, int]:
    """Bytes held: weights in all, of them the separate draft model's, what native loading would hold, the caches."""
    draft = model.draft_report.weight_bytes if model.draft_report is not None else 0
    head = model.draft_report.head_bytes if model.draft_report is not None else 0
    return {
        "weight_bytes": model.weight_bytes,
        "head_bytes": head or model.report.head_bytes,
        "draft_weight_bytes": draft,
        "native_weight_bytes": model.report.weight_bytes + head,
        "cache_bytes": run.engine.stats.cache_bytes,
    }
