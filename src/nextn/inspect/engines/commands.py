"""The exact command that switches a head on, engine by engine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from nextn.inspect.case import Case
from nextn.inspect.engines.support import Support
from nextn.inspect.engines.versions import parse_version

PROMPT = "--prompt 'Once upon a time'"


def draft_tokens(case: Case, support: Support) -> int:
    """How many draft tokens to suggest: what the engine insists on, one a layer where each is used, else three."""
    if support.drafts is not None:
        return support.drafts
    family = case.facts.family
    layers = len(case.facts.layers)
    if family is not None and family.physical_layers != "reuse" and support.heads is None and layers > 1:
        return layers
    return 3


def command(case: Case, engine: str, support: Support, version: str) -> str:
    """The command, ready to paste; GGUF conversion included for llama.cpp. BASE is the user's to fill in."""
    source, drafts = case.source, draft_tokens(case, support)
    alone = case.facts.alone
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {'BASE' if alone else source} "
            f"--speculative-algorithm NEXTN {f'--speculative-draft-model-path {source} ' if alone else ''}"
            f"--speculative-num-steps {drafts} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {drafts + 1}{_hybrid_state(version) if support.hybrid else ''}"
        )
    if engine == "vllm":
        declared = case.facts.declared or 1
        if support.drafts is None and drafts > declared > 1 and drafts % declared:
            drafts = declared
        draft = {"model": case.place} if alone else {}
        settings = json.dumps({"method": "mtp", **draft, "num_speculative_tokens": drafts}, separators=(",", ":"))
        return f"vllm serve {'BASE' if alone else source} --speculative-config {shlex.quote(settings)}"
    if engine == "transformers":
        named = repr(case.place)
        return f"AutoModelForCausalLM.from_pretrained({named}).generate(**inputs, use_mtp=True)  # batch 1"
    if engine == "llamacpp":
        return _llamacpp(case, f"--spec-type draft-mtp --spec-draft-n-max {drafts}")
    if engine == "tensorrt_llm":
        return (
            f"printf 'speculative_config:\\n  decoding_type: MTP\\n  max_draft_len: {drafts}\\n' > mtp.yaml && "
            f"trtllm-serve {source} --extra_llm_api_options mtp.yaml"
        )
    return f"nextn generate {f'BASE --head {source}' if alone else case.named} --draft-tokens {drafts} {PROMPT}"


def _hybrid_state(version: str) -> str:
    """SGLang's strategy for recurrent state: ``extra_buffer`` crashes before 0.5.16, and the flag had another name."""
    at = parse_version(version)
    if at < (0, 5, 16):
        return " --mamba-scheduler-strategy no_buffer --page-size 1 --disable-overlap-schedule"
    return f" --mamba-{'radix-cache' if at >= (0, 5, 17) else 'scheduler'}-strategy extra_buffer"


def _llamacpp(case: Case, run: str) -> str:
    if case.is_gguf and case.is_remote:
        parts = Path(case.place).parts
        repo, file = shlex.quote("/".join(parts[:2])), shlex.quote("/".join(parts[2:]))
        return f"llama-server --hf-repo {repo} --hf-file {file} {run}"
    if case.is_gguf:
        return f"llama-server -m {case.source} {run}"
    where = f"--remote {case.source}" if case.is_remote else case.source
    return f"python convert_hf_to_gguf.py {where} --outfile model.gguf && llama-server -m model.gguf {run}"
