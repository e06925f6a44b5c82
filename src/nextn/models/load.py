"""Fill a decoder and its head from a checkpoint in one pass over the shards.

Weights are read in bounded pieces straight into their parameters, converted on the way, so that peak memory stays
near the weights' own size. Every parameter must be covered: missing and unexpected tensors are errors under their
checkpoint names, and nothing is left unset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TypeVar, overload

import torch
from torch import Tensor, nn

from nextn.checkpoint.source import Checkpoint
from nextn.checkpoint.tensors import TensorInfo
from nextn.errors import NextnError
from nextn.models.blocks import GatedDeltaNet, RMSNorm
from nextn.models.config import DecoderConfig, decoder_config
from nextn.models.decoder import Decoder, Drafter
from nextn.models.layout import head_keys, target_keys
from nextn.models.slots import Slot, slots

PIECE_BYTES = 1 << 20
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


@dataclass
class LoadReport:
    """What a load did.

    Attributes:
        tensors: checkpoint tensors that were read.
        bytes_read: from the files.
        weight_bytes: held by target and head together, each shared tensor once.
        head_bytes: held by the head alone.
        skipped: keys that belong to the family but not to the language model (vision, copies of shared tensors).
    """

    tensors: int = 0
    bytes_read: int = 0
    weight_bytes: int = 0
    head_bytes: int = 0
    skipped: list[str] = field(default_factory=list)


def count_head_layers(checkpoint: Checkpoint, config: DecoderConfig) -> int:
    """Physical head layers whose tensors the checkpoint holds (0: no head)."""
    found = -1
    for key in checkpoint.tensors:
        located = config.family.locate(key, layers=config.layers)
        if located is not None and not located.spec.optional:
            found = max(found, located.indices.get("i", 0))
    return min(found + 1, 64)


def load_decoder(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    mtp: bool = True,
    head: Checkpoint | None = None,
    progress: Progress | None = None,
) -> tuple[Decoder, LoadReport]:
    """Build and fill a decoder with its head.

    Args:
        checkpoint: a local checkpoint.
        dtype: compute dtype of the weights; norms and decay parameters stay in at least float32.
        mtp: with the head.
        head: take the head's tensors from this checkpoint instead.
        progress: called as bytes arrive.
    Raises:
        NextnError: quantised weights, no head, missing, unexpected or misshapen tensors, non-finite values.
    """
    config = _config(checkpoint, head or checkpoint, mtp)
    wanted = [(checkpoint, n, k) for n, k in target_keys(config, checkpoint.config, checkpoint.tensors)]
    if mtp:
        wanted += _head_wanted(config, head or checkpoint)
    report = LoadReport()
    model = _fill(Decoder, config, wanted, report, dtype, device, progress)
    used = {key for source, _, key in wanted if source is checkpoint}
    report.skipped = check_unexpected(checkpoint, config, used)
    return model, report


def load_drafter(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    head: Checkpoint | None = None,
    progress: Progress | None = None,
) -> tuple[Drafter, LoadReport]:
    """Build and fill a draft model of its own from a checkpoint: embedding, output head and MTP head.

    Arguments and errors as `load_decoder`.
    """
    config = _config(checkpoint, head or checkpoint, mtp=True)
    pairs = target_keys(config, checkpoint.config, checkpoint.tensors)
    wanted = [(checkpoint, name, key) for name, key in pairs if name in ("embed.weight", "head.weight")]
    wanted += _head_wanted(config, head or checkpoint)
    report = LoadReport()
    return _fill(Drafter, config, wanted, report, dtype, device, progress), report


Wanted = tuple[Checkpoint, str, str]
"""(where from, canonical name, checkpoint key)."""
Built = TypeVar("Built", bound=Drafter)


def _config(checkpoint: Checkpoint, head: Checkpoint, mtp: bool) -> DecoderConfig:
    if not checkpoint.config:
        raise NextnError(f"{checkpoint.source} has no config.json.", "Name the whole folder of a checkpoint.")
    if not checkpoint.tensors:
        raise NextnError(f"{checkpoint.source} has no readable safetensors weights.", "Download or export them.")
    refuse_quantised(checkpoint)
    config = decoder_config(checkpoint.config)
    if not mtp:
        return replace(config, head_layers=0)
    count = count_head_layers(head, config)
    if count == 0:
        raise NextnError(
            f"{head.source} holds no MTP head.",
            "Decode without one (`--no-mtp`), or see `nextn inspect` for what is missing.",
        )
    return replace(config, head_layers=1 if config.family.physical_layers == "reuse" else count)


def _head_wanted(config: DecoderConfig, head: Checkpoint) -> list[Wanted]:
    return [(head, name, key) for name, key in head_keys(config, head.config, head.tensors)]


def _fill(
    kind: type[Built],
    config: DecoderConfig,
    wanted: list[Wanted],
    report: LoadReport,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> Built:
    model = build(config, dtype=dtype, device=device, kind=kind)
    places = slots(model)
    check_wanted(wanted, places)
    fill_slots(wanted, places, report, progress)
    report.weight_bytes = parameter_bytes(model.parameters())
    report.head_bytes = parameter_bytes(model.mtp.parameters()) if model.mtp is not None else 0
    return model


def parameter_bytes(parameters: Iterable[Tensor]) -> int:
    return sum({p.data_ptr(): p.numel() * p.element_size() for p in parameters}.values())


@overload
def build(config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> Decoder: ...
@overload
def build(config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, kind: type[Built]) -> Built: ...
def build(config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, kind: type[Drafter] = Decoder) -> Drafter:
    """A decoder or draft model with uninitialised, frozen parameters of the right dtypes."""
    with torch.device("meta"):
        model = kind(config)
    high = torch.float64 if dtype == torch.float64 else torch.float32
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            keep = isinstance(module, RMSNorm) or (isinstance(module, GatedDeltaNet) and name in ("a_log", "dt_bias"))
            empty = torch.empty(param.shape, dtype=high if keep else dtype, device=device)
            module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    model.rotary.to(device)
    return model


def refuse_quantised(checkpoint: Checkpoint) -> None:
    """Raise NextnError where the weights are stored in a form that nextn does not decode."""
    config = checkpoint.config
    method = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    odd = next((t for t in checkpoint.tensors.values() if t.dtype not in DTYPES and ".visual." not in t.key), None)
    if method or (odd is not None and odd.dtype not in ("I64", "BOOL")):
        name = method.get("quant_method", "quantised") if isinstance(method, dict) else (odd.dtype if odd else "?")
        raise NextnError(
            f"{checkpoint.source} holds quantised weights ({name}); nextn decodes bf16, fp16 and float32.",
            "`nextn inspect` prints the command that runs it in an engine that can.",
        )


def check_wanted(wanted: list[Wanted], places: dict[str, Slot]) -> None:
    """Every parameter is covered by exactly the tensors wanted, each there in the right shape and dtype."""
    missing: list[str] = []
    covered: dict[int, int] = {}
    for source, name, key in wanted:
        slot = places[name]
        info = source.tensors.get(key)
        if info is None:
            missing.append(key)
            continue
        elements = 1
        for n in info.shape:
            elements *= n
        squeezed = [n for n in info.shape if n != 1]
        if elements != slot.view.numel() or squeezed != [n for n in slot.view.shape if n != 1]:
            raise NextnError(
                f"{key} has shape {list(info.shape)} where the model needs {list(slot.view.shape)}.",
                "The tensor belongs to a model of another size; use a matching checkpoint.",
            )
        if info.dtype not in DTYPES:
            raise NextnError(f"{key} is stored as {info.dtype}.", "nextn decodes bf16, fp16, float32 and float64.")
        covered[slot.param.data_ptr()] = covered.get(slot.param.data_ptr(), 0) + elements
    for name, slot in places.items():
        if not missing and covered.get(slot.param.data_ptr(), 0) != slot.param.numel():
            missing.append(name)
    layers = [key for _, name, key in wanted if name.startswith("layers.")]
    if layers and set(layers) <= set(missing):
        raise NextnError(
            f"{wanted[0][0].source} holds no layer of the model: it is a head alone, or another model.",
            "Name the target, with `--head` (or `init=`) for this folder; or merge the two with `nextn merge`.",
        )
    if missing:
        shown = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
        raise NextnError(
            f"{wanted[0][0].source} lacks {_tensors(len(missing))} that the model needs: {shown}.",
            "See `nextn inspect`; merge the missing part, or decode with `--no-mtp` if only the head is affected.",
        )


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' * (count != 1)}"


def check_unexpected(checkpoint: Checkpoint, config: DecoderConfig, used: set[str]) -> list[str]:
    """Keys left over that are known not to matter; any other is an error."""
    ignored = [re.compile(p) for p in config.family.ignored]
    skipped: list[str] = []
    unknown: list[str] = []
    for key in checkpoint.tensors:
        if key in used:
            continue
        known = (
            any(p.fullmatch(key) for p in ignored)
            or config.family.locate(key, layers=config.layers) is not None
            or (config.tied and key.endswith("lm_head.weight"))
        )
        (skipped if known else unknown).append(key)
    if unknown:
        shown = ", ".join(unknown[:6]) + (f" and {len(unknown) - 6} more" if len(unknown) > 6 else "")
        raise NextnError(
            f"{checkpoint.source} holds {_tensors(len(unknown))} that {config.family.title} models lack: {shown}.",
            "config.json and weights do not belong together, or adapters are left in; merge or remove them.",
        )
    return skipped


def fill_slots(
    wanted: list[Wanted],
    places: dict[str, Slot],
    report: LoadReport,
    progress: Progress | None = None,
) -> None:
    """Read every wanted tensor into its slot, file by file in file order."""
    by_file: dict[Path, list[tuple[TensorInfo, Slot]]] = {}
    for source, name, key in wanted:
        assert source.root is not None
        info = source.tensors[key]
        by_file.setdefault(source.root / info.file, []).append((info, places[name]))
    total = sum(info.nbytes for entries in by_file.values() for info, _ in entries)
    for path, entries in by_file.items():
        try:
            with path.open("rb", buffering=0) as file:
                for info, slot in sorted(entries, key=lambda entry: entry[0].start):
                    read_tensor(file, info, slot)
                    report.tensors += 1
                    report.bytes_read += info.nbytes
                    if progress is not None:
                        progress(report.bytes_read, total)
        except OSError as error:
            raise NextnError(f"{path} cannot be read: {error.strerror}.", "Check the file.") from None


@torch.no_grad()
def read_tensor(file: BinaryIO, info: TensorInfo, slot: Slot) -> None:
    """Read one tensor in pieces of at most PIECE_BYTES (rows in another order: whole) and store it."""
    source = DTYPES[info.dtype]
    file.seek(info.start)
    if slot.order is not None:
        value = _read(file, info, info.nbytes, source).view(info.shape)
        _check_finite(value, info)
        slot.write(value)
        return
    if not slot.view.is_contiguous():
        raise AssertionError(f"slot of {info.key} is not contiguous")
    flat = slot.view.view(-1)
    width = source.itemsize
    done = 0
    while done < flat.numel():
        count = min(PIECE_BYTES // width, flat.numel() - done)
        value = _read(file, info, count * width, source)
        _check_finite(value, info)
        flat[done : done + count].copy_(value)
        done += count


def _read(file: BinaryIO, info: TensorInfo, count: int, dtype: torch.dtype) -> Tensor:
    buffer = bytearray(count)
    got = 0
    with memoryview(buffer) as view:
        while got < count:
            n = file.readinto(view[got:])  # type: ignore[attr-defined]
            if not n:
                raise NextnError(f"{info.file} ends inside {info.key}.", "Download it again.")
            got += n
    return torch.frombuffer(buffer, dtype=dtype)


def _check_finite(value: Tensor, info: TensorInfo) -> None:
    if not bool(torch.isfinite(value).all()):
        raise NextnError(
            f"{info.key} in {info.file} holds NaN or infinite values.", "The checkpoint is damaged; export it again."
        )


def default_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """float32 on a CPU; elsewhere the checkpoint's own dtype (bf16 unless it says otherwise)."""
    if device.type == "cpu":
        return torch.float32
    text = checkpoint.config.get("text_config") or checkpoint.config
    named = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    chosen = torch.bfloat16
    with suppress(AttributeError):
        chosen = getattr(torch, named)
    return chosen if chosen in DTYPES.values() else torch.bfloat16
