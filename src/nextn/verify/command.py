"""The command `nextn verify`: the contract, a load in an engine, a probe on text; one verdict and its exit code."""

from __future__ import annotations

import json as json_format
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nextn.assets import embedded_model
from nextn.checkpoint.source import Checkpoint, open_checkpoint
from nextn.errors import NextnError
from nextn.verify.contract import ContractCheck, check_contract
from nextn.verify.engine import LAST_LINES, LoadCheck, check_load

if TYPE_CHECKING:
    from nextn.verify.probe import Probe

ENGINES = ("sglang", "vllm", "transformers", "nextn")
EPILOG = """
Examples:\n
\b
  nextn verify ./out
  nextn verify ./out --engine sglang --engine-python ~/sglang/bin/python
  nextn verify ./out --probe text.txt
"""


def verify(
    model: Annotated[str | None, typer.Argument(help="Checkpoint folder; default: the embedded model.")] = None,
    engine: Annotated[str | None, typer.Option(help="Load the head in sglang, vllm, transformers or nextn.")] = None,
    engine_python: Annotated[str | None, typer.Option(help="The Python that has the engine, if not this one.")] = None,
    probe: Annotated[
        Path | None, typer.Option(help="Text file (or JSON list of token ids) to measure acceptance on.")
    ] = None,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", "-k", help="Draft length of the probe.")] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use at most.")] = 8192,
    device: Annotated[str | None, typer.Option(help="Where the probe runs: cpu, cuda, ...")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")] = None,
    token: Annotated[str | None, typer.Option(help="Hub token.", envvar="HF_TOKEN")] = None,
) -> None:
    """Prove that a head is whole, that an engine loads it, and that it is wired right.

    Without --engine and --probe the files alone are checked.
    """
    if engine is not None and engine not in ENGINES:
        raise NextnError(f"nextn knows no engine {engine!r} to load a head in.", f"Choose one of {', '.join(ENGINES)}.")
    checkpoint = open_checkpoint(model or str(embedded_model()), revision=revision, token=token)
    contract = check_contract(checkpoint, values=probe is not None)
    load = check_load(contract.report.facts, engine, engine_python) if engine else None
    probed = _probe(checkpoint, probe, draft_tokens, tokens, device) if probe and contract.passed else None
    verdict = _verdict(contract, load, probed)
    if json:
        print(json_format.dumps(_as_json(checkpoint, contract, load, probed, verdict), indent=2))
    else:
        for line in _lines(checkpoint, contract, load, probed, verdict, asked=probe is not None):
            print(line)
    if verdict != "passed":
        raise typer.Exit(1 if verdict == "failed" else 2)


def _verdict(contract: ContractCheck, load: LoadCheck | None, probed: Probe | None) -> str:
    if not contract.passed or (load and load.status == "failed") or (probed and not probed.passed):
        return "failed"
    return "unavailable" if load and load.status == "unavailable" else "passed"


def _probe(checkpoint: Checkpoint, file: Path, draft_tokens: int, tokens: int, device: str | None) -> Probe:
    from nextn import api
    from nextn.verify.probe import probe

    if not 1 <= draft_tokens <= 8:
        raise NextnError(f"--draft-tokens is {draft_tokens}.", "Give a whole number from 1 to 8.")
    if checkpoint.root is None:
        raise NextnError(f"{checkpoint.source} is not on this machine.", "Download it, then verify the folder.")
    try:
        raw = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise NextnError(f"{file} cannot be read as text.", "Name a UTF-8 text file.") from None
    loaded = api.load(str(checkpoint.root), device=device)
    if file.suffix == ".json":
        ids = _ids(raw, file, loaded.target.config.vocab)
    elif loaded.tokenizer is None:
        raise NextnError(f"{checkpoint.source} ships no tokenizer.", "Give a JSON list of token ids instead of text.")
    else:
        ids = loaded.tokenizer.encode(raw)
    layers = loaded.target.config.head_layers
    reused = loaded.target.config.family.physical_layers == "reuse"
    steps = draft_tokens if reused else min(draft_tokens, layers)
    return probe(loaded.target, ids[:tokens], steps, api.draft_vocabulary(loaded, None))


def _ids(raw: str, file: Path, vocab: int) -> list[int]:
    try:
        ids = json_format.loads(raw)
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab for i in ids):
        raise NextnError(f"{file} is no JSON list of token ids below {vocab}.", "Give one, or a text file.")
    return ids


def _as_json(
    checkpoint: Checkpoint, contract: ContractCheck, load: LoadCheck | None, probed: Probe | None, verdict: str
) -> dict[str, Any]:
    family = contract.report.facts.family
    return {
        "source": checkpoint.source,
        "family": family.name if family else None,
        "verdict": verdict,
        "contract": contract.as_json(),
        "engines": list(contract.engines),
        "load": load.as_json() if load else None,
        "probe": probed.as_json() if probed else None,
    }


def _lines(
    checkpoint: Checkpoint,
    contract: ContractCheck,
    load: LoadCheck | None,
    probed: Probe | None,
    verdict: str,
    *,
    asked: bool,
) -> list[str]:
    facts = contract.report.facts
    lines = [f"{verdict}: {checkpoint.source}"]
    state = "passed" if contract.passed else "failed"
    lines.append(f"  contract  {state}: {facts.found} of {len(facts.expected)} tensors")
    for problem in contract.problems:
        lines += [f"            {problem.code}: {problem.message}", f"              {problem.fix}"]
    lines += [f"            {r.severity}: {r.message}" for r in contract.remarks if r.severity == "warning"]
    lines += [f"            warning: {note}" for note in contract.engines]
    if load:
        name = f"{load.engine} {load.version}".strip()
        lines.append(f"  load      {load.status} ({name}): {load.detail}")
        for survivor in load.survivors:
            keys = ", ".join(survivor.keys) or "no key that the family has"
            lines.append(f"            {survivor.parameter}: {survivor.share:.0%} not loaded; meant for it: {keys}")
        lines += [f"            said: {warning}" for warning in load.warnings[:LAST_LINES]]
        if load.from_target:
            lines.append(f"            taken from the target when both run: {', '.join(load.from_target)}")
        lines += [f"            stubbed: {package} ({why})" for package, why in load.stubs.items()]
    if probed:
        lines.append(f"  probe     {'passed' if probed.passed else 'failed'}: {probed.tokens} tokens of text")
        if probed.draft_vocab is not None:
            lines.append(f"            drafts from the {probed.draft_vocab:,} ids that the head names")
        lines.append(f"            {'as the family says':<20} {_shares(probed.head.acceptance)}")
        for control in probed.controls:
            lines.append(f"            {control.name:<20} {_shares(control.counts.acceptance)}  {control.judgement}")
        for suspect in probed.suspects:
            lines.append(f"            not beaten: {suspect.name} ({suspect.mistake})")
        lines += [f"            warning: {warning}" for warning in probed.warnings]
    elif asked:
        lines.append("  probe     not run, since the contract failed")
    return lines


def _shares(acceptance: list[float]) -> str:
    return "  ".join(f"{share:.3f}" for share in acceptance)


verify.__doc__ = cleandoc(verify.__doc__ or "") + "\n" + EPILOG
