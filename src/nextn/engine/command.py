"""`nextn generate`: read the options, load, decode, print text as it comes or one JSON object."""

from __future__ import annotations

import json
import os
import sys
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nextn.errors import NextnError
from nextn.options import MAX_CHUNK, DraftVocabulary

if TYPE_CHECKING:
    from nextn.api import Model

SAMPLING = "Sampling and stops (defaults: the checkpoint's generation_config.json, else greedy)"
LOADING = "Loading"
EPILOG = """
Examples:\n
\b
  nextn generate --prompt "def main():" --show-drafts
  nextn generate ./Qwen3.5-4B --chat --prompt "Name three rivers." --temperature 0.7 --seed 1
  nextn generate ./checkpoint --prompt-ids 12,7,99 --max-tokens 32 --json
  nextn generate ./Qwen3.5-4B --prompt-file article.txt --no-mtp
"""


def generate(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or hub repository; default: the embedded model.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt text.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the prompt text; - is standard input.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Prompt as token ids: 1,2,3.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt through the checkpoint's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, nothing before.")] = False,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark accepted draft tokens (green) and rejected ones (red).")
    ] = False,
    draft_tokens: Annotated[
        str | None,
        typer.Option("--draft-tokens", "-k", help="Draft length K, 1 to 8 [3], or auto: what pays, round by round."),
    ] = None,
    draft_vocab: Annotated[
        str | None,
        typer.Option(
            help="Draft only the N most frequent tokens (N needs a token_order.json in the checkpoint, or "
            "--draft-vocab-text), or a file of ids; the output is the same. "
            "[what the head was trained to draft; full drafts from all]"
        ),
    ] = None,
    draft_vocab_text: Annotated[
        Path | None, typer.Option(help="Text like the output, to count frequent tokens for --draft-vocab N in.")
    ] = None,
    no_mtp: Annotated[bool, typer.Option("--no-mtp", help="Decode without the head.")] = False,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="In bf16 too, the very tokens of --no-mtp; slower, on an NVIDIA GPU."),
    ] = False,
    separate_draft: Annotated[
        bool, typer.Option("--separate-draft", help="Load the head as a second model, to compare against.")
    ] = False,
    head: Annotated[str | None, typer.Option(help="Take the head from this folder instead.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Prompt tokens a prefill forward; default by device.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate at most [256].", rich_help_panel=SAMPLING)
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the most probable tokens up to this mass.", rich_help_panel=SAMPLING)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep the k most probable tokens; 0 or -1 is off.", rich_help_panel=SAMPLING)
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Keep tokens at least this share as probable as the best.", rich_help_panel=SAMPLING),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Makes sampling repeatable for one draft length (not with auto).", rich_help_panel=SAMPLING),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Over prompt and output; 1 is off.", rich_help_panel=SAMPLING)
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="For ids in the output, -2 to 2.", rich_help_panel=SAMPLING)
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="A time an id is in the output, -2 to 2.", rich_help_panel=SAMPLING)
    ] = None,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=BIAS, repeatable.", rich_help_panel=SAMPLING)] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Report this many log probabilities a token (with --json).", rich_help_panel=SAMPLING),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string, repeatable.", rich_help_panel=SAMPLING)] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="Stop token id, repeatable.", rich_help_panel=SAMPLING)
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Do not stop at the checkpoint's own end ids.", rich_help_panel=SAMPLING),
    ] = False,
    min_tokens: Annotated[
        int | None, typer.Option(help="Tokens before which nothing stops.", rich_help_panel=SAMPLING)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or float64.", rich_help_panel=LOADING)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...", rich_help_panel=LOADING)] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub repository.", rich_help_panel=LOADING)
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="Access token for the hub.", envvar="HF_TOKEN", rich_help_panel=LOADING)
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Another cache than the hub's own.", rich_help_panel=LOADING)
    ] = None,
) -> None:
    """Decode with a checkpoint's own MTP head, losslessly.

    Greedy tokens are those of decoding without it, sampled ones follow the same law. In bfloat16 a forward of several
    rows rounds differently from one of a single row, so that nearly equal choices may fall differently; --exact
    excludes that too.
    """
    given = sum(x is not None for x in (prompt, prompt_file, prompt_ids))
    if given != 1:
        raise NextnError(
            "No prompt is given." if given == 0 else "More than one prompt is given.",
            "Give one of --prompt TEXT, --prompt-file FILE, --prompt-ids 1,2,3.",
        )
    length = _draft_tokens(draft_tokens) if draft_tokens is not None else None
    if chunk is not None and not 1 <= chunk <= MAX_CHUNK:
        raise NextnError(f"--chunk is {chunk}.", f"Give a whole number from 1 to {MAX_CHUNK}.")
    if no_mtp and (separate_draft or head is not None or draft_vocab is not None):
        raise NextnError("--no-mtp contradicts --separate-draft, --head and --draft-vocab.", "Leave one of them out.")
    check_vocab_text(draft_vocab, draft_vocab_text)
    for given_without, option, needed in (
        (system is not None and not chat, "--system", "--chat"),
        (logprobs is not None and not as_json, "--logprobs", "--json"),
    ):
        if given_without:
            raise NextnError(f"{option} has no effect without {needed}.", f"Add {needed}, or leave {option} out.")
    if show_drafts and as_json:
        raise NextnError("--show-drafts marks text as it comes, and --json prints none.", "Leave one of them out.")
    if no_mtp and draft_tokens is not None:
        raise NextnError("--no-mtp contradicts --draft-tokens.", "Leave one of them out.")
    text = _prompt_text(prompt, prompt_file)
    ids = _ids(prompt_ids) if prompt_ids is not None else None
    if text == "" or ids == []:
        raise NextnError("The prompt is empty.", "Give at least one token.")
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": _bias(logit_bias) if logit_bias else None,
        "logprobs": logprobs,
        "stop": stop or None,
        "stop_token_ids": stop_token_id or None,
        "ignore_eos": ignore_eos or None,
        "min_tokens": min_tokens,
    }

    from nextn import api
    from nextn.engine.progress import loading
    from nextn.engine.threads import fit_threads

    with loading(sys.stderr) as progress:
        loaded = api.load(
            model,
            mtp=not no_mtp,
            separate_draft=separate_draft,
            head=head,
            dtype=dtype,
            device=device,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            progress=progress,
        )
    fit_threads(loaded.weight_bytes)
    given_prompt: str | list[int]
    if ids is not None:
        if chat:
            raise NextnError("--chat needs text.", "Give the prompt as text.")
        given_prompt = ids
    elif chat:
        if loaded.tokenizer is None:
            raise NextnError(f"{loaded.folder} ships no tokenizer, so there is no chat.", "Give --prompt-ids.")
        messages = [{"role": "system", "content": system}] if system is not None else []
        given_prompt = loaded.tokenizer.encode_chat([*messages, {"role": "user", "content": text}])
    else:
        assert text is not None
        given_prompt = text
    run = api.Run(
        loaded,
        [given_prompt],
        draft_tokens=0 if no_mtp else length,
        draft_vocab=asked_vocab(loaded, draft_vocab, draft_vocab_text),
        chunk=chunk,
        exact=exact,
        **options,
    )
    if as_json:
        for _ in run:
            pass
        print(json.dumps({**run.results[0].as_json(), "memory": api.memory(loaded, run)}))
        return
    from nextn.engine.show import Printer, summary

    printer = Printer(sys.stdout, loaded.tokenizer, run.requests[0].prompt, mark_drafts=show_drafts)
    for step in run:
        printer.step(step)
    printer.end()
    print(summary(run.results[0], api.memory(loaded, run)), file=sys.stderr)


def check_vocab_text(asked: str | None, text: Path | None) -> None:
    """Refuse ``--draft-vocab-text`` where ``--draft-vocab`` is no count."""
    if text is not None and not (asked or "").isdecimal():
        given = f"--draft-vocab is {asked[:40]!r}" if asked else "there is no --draft-vocab"
        raise NextnError(
            f"--draft-vocab-text needs to know how many tokens to draft from, and {given}.",
            "Give --draft-vocab N, or leave the text out.",
        )


def asked_vocab(model: Model, asked: str | None, text: Path | None = None) -> DraftVocabulary:
    """The value of ``--draft-vocab``: how many ids, a file of them, full, or None for the head's own.

    Args:
        text: where frequent ids are counted.
    """
    from nextn import api
    from nextn.engine.draft_vocab import LONGEST_ID, read_ids

    if asked is None or asked == "full":
        return "full" if asked else None
    if asked.isdecimal() and len(asked) <= LONGEST_ID:
        return api.frequent_vocab(model, int(asked), text)
    if not os.path.exists(asked):  # also of what is no path at all
        raise NextnError(
            f"--draft-vocab is {asked[:60]!r}, which is neither a count nor a file.",
            f"Give how many ids, from 2 to {model.target.config.vocab}, a file of ids, or full.",
        )
    return read_ids(Path(asked))


def _prompt_text(prompt: str | None, file: Path | None) -> str | None:
    if file is None:
        return prompt
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise NextnError(f"{file} cannot be read: {error.strerror}.", "Check the path.") from None
    except UnicodeDecodeError:
        raise NextnError(f"{file} is not UTF-8 text.", "Convert it, or give --prompt-ids.") from None


def _draft_tokens(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if text not in list("12345678"):
        raise NextnError(
            f"--draft-tokens is {text[:20]}.", "Give a whole number from 1 to 8, auto, or --no-mtp for no drafts."
        )
    return int(text)


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise NextnError(f"--prompt-ids is {text[:60]!r}.", "Give whole numbers with commas between: 1,2,3.") from None


def _bias(entries: list[str]) -> dict[int, float]:
    out = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            out[int(token)] = float(value)
        except ValueError:
            raise NextnError(f"--logit-bias is {entry[:60]!r}.", "Give a token id and a number: 42=-5.") from None
    return out


generate.__doc__ = cleandoc(generate.__doc__ or "") + "\n" + EPILOG
