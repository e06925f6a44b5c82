"""The commands `nextn extract` and `nextn merge`: options in, a plan or a result out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from nextn.checkpoint.source import Checkpoint, open_checkpoint
from nextn.errors import NextnError
from nextn.inspect.engines.versions import ENGINES
from nextn.surgery.extract import plan_extract
from nextn.surgery.inplace import Recovered, identity, interrupted, recover, require_in_place, write_in_place
from nextn.surgery.merge import MergeOptions, plan_merge
from nextn.surgery.plan import LinkMode, Plan
from nextn.surgery.show import as_json, as_lines, print_json
from nextn.surgery.write import quiet, refuse_existing, write

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Only = Annotated[bool, typer.Option("--plan", help="Print what would be written; change nothing.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")]
Token = Annotated[str | None, typer.Option(help="Hub token, if not the one of `hf auth login`.")]
EXTRACT_EPILOG = """
Examples:\n
\b
  nextn extract Qwen/Qwen3.5-4B ./head
  nextn extract ./tuned ./head --plan
"""
MERGE_EPILOG = """
Examples:\n
\b
  nextn merge ./finetune ./head ./out --plan
  nextn merge ./finetune Qwen/Qwen3.5-4B ./out --replace
  nextn merge ./finetune ./head --in-place
"""


def extract(
    model: Annotated[str, typer.Argument(help="Checkpoint: a folder, or a hub repository as org/name.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    plan: Only = False,
    json: Json = False,
    revision: Revision = None,
    token: Token = None,
) -> None:
    """Take a checkpoint's MTP head out as a small folder of its own."""
    made = plan_extract(open_checkpoint(model, revision=revision, token=token), out)
    refuse_existing(out)
    _carry_out(made, json, plan, write)


def merge(
    base: Annotated[Path, typer.Argument(help="Checkpoint folder that receives the head; changed by --in-place only.")],
    head: Annotated[str, typer.Argument(help="Head folder, whole checkpoint, or hub repository as org/name.")],
    out: Annotated[Path | None, typer.Argument(help="Folder to make; it must not exist.")] = None,
    link: Annotated[str, typer.Option(help="How OUT gets the base's shards: hard, symlink or copy.")] = "hard",
    replace: Annotated[bool, typer.Option("--replace", help="Replace the head that the base has.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the head in OUT: auto (the base's), bf16, fp16 or fp32.")] = "auto",
    experts: Annotated[str, typer.Option(help="Routed experts: auto, split or grouped.")] = "auto",
    engine: Annotated[
        str | None, typer.Option(help="Write what this engine reads, e.g. vllm; refuse where it would fail.")
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Add the head to BASE itself; no OUT.")] = False,
    plan: Only = False,
    json: Json = False,
    revision: Revision = None,
    token: Token = None,
) -> None:
    """Put an MTP head into a checkpoint: shards linked, index, config and quantisation lists updated with it."""
    options = MergeOptions(_link(link), replace, dtype, experts, engine, in_place)
    if experts not in ("auto", "split", "grouped"):
        raise NextnError(f"{experts!r} is no storage of experts.", "Choose auto, split or grouped.")
    if engine is not None and engine not in ENGINES:
        raise NextnError(f"nextn knows no engine {engine!r}.", f"Choose one of {', '.join(ENGINES)}.")
    if in_place == (out is not None):
        raise NextnError("Either OUT or --in-place says where the result goes.", "Give exactly one of the two.")
    if interrupted(base) and not (in_place and not plan):
        raise NextnError(f"An in-place merge into {base} was interrupted.", "Repeat it with --in-place to finish it.")
    done = recover(base) if in_place and not plan else Recovered("nothing")
    opened = open_checkpoint(base), open_checkpoint(head, revision=revision, token=token)
    if done.state == "completed":
        _say_completed(done, base, opened[1], json)
        return
    target = out if out is not None else base
    made = plan_merge(*opened, target, options)
    if in_place:
        require_in_place(made)
        _carry_out(made, json, plan, partial(write_in_place, head=identity(opened[1])))
    else:
        refuse_existing(target)
        _carry_out(made, json, plan, write)


def _link(asked: str) -> LinkMode:
    for mode in ("hard", "symlink", "copy"):
        if asked == mode:
            return mode
    raise NextnError(f"{asked!r} is no way to link.", "Choose --link hard, symlink or copy.")


def _say_completed(done: Recovered, base: Path, head: Checkpoint, json: bool) -> None:
    """Raises NextnError where the merge that was completed placed another head than the one asked for now."""
    placed = done.plan.get("head")
    if done.head and done.head != identity(head):
        raise NextnError(
            f"An interrupted merge of {placed or 'another head'} into {base} was completed first;"
            f" {head.source} was not placed.",
            "Repeat the command with --replace to put it in that head's place.",
        )
    if json:
        usual = {"action": "merge", "out": str(base), **done.plan}
        print_json({**usual, "written": True, "recovered": True, "seconds": 0.0})
    else:
        print(f"completed the interrupted merge of {placed or head.source} into {base}")


def _carry_out(
    plan: Plan, json: bool, only_plan: bool, writer: Callable[[Plan, Callable[[int], None]], object]
) -> None:
    started = time.monotonic()
    if not only_plan:
        with _progress(plan, quietly=json) as advance:
            writer(plan, advance)
    if json:
        print_json({**as_json(plan), "written": not only_plan, "seconds": round(time.monotonic() - started, 3)})
        return
    for line in as_lines(plan, only_plan):
        print(line)


@contextmanager
def _progress(plan: Plan, quietly: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal for work of more than a moment; nothing elsewhere, since the report follows."""
    total = sum(p.nbytes for s in plan.shards for piece in s.pieces for p in piece.parts)
    total += sum(link.nbytes for link in plan.links if link.mode == "copy")
    if quietly or not sys.stderr.isatty() or total < 1 << 28:
        yield quiet
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"writing {plan.out.name}", total=total)
        yield lambda moved: bar.advance(task, moved)


extract.__doc__ = (extract.__doc__ or "") + "\n" + EXTRACT_EPILOG
merge.__doc__ = (merge.__doc__ or "") + "\n" + MERGE_EPILOG
