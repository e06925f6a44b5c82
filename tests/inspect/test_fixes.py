"""Every command that a report prints can be run: options exist, words in capitals aside; and the repairs repair."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from nextn import cli
from nextn.checkpoint.source import open_checkpoint
from nextn.inspect.examine import Report, examine
from nextn.surgery.extract import plan_extract
from nextn.surgery.write import write
from nextn.train.command import read_settings
from tests.fixtures import HEAD_SHARD, TRUNK_SHARD, Folder, checkpoint, qwen3_5, qwen3_5_moe, qwen3_next
from tests.inspect import cases
from tests.inspect.asking import LINEARS, SMALL, ask, codes, small
from tests.inspect.cases import ATTENTION, MLP, compressed

PROGRAMS = {
    "hf",
    "python",
    "vllm",
    "rm",
    "gguf-set-metadata",
    "llama-server",
    "llama-quantize",
    "printf",
    "trtllm-serve",
}
PLACEHOLDERS = {"BASE", "HEAD", "OUT", "REPO", "PUBLISHED", "FOLDER", "OUT.gguf", "BF16.gguf", "Q4_K_M"}


def fp8(**extra: object) -> Folder:
    return small(
        quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=["lm_head", "mtp.fc"], **extra
    )


def stale() -> Folder:
    folder = fp8()
    folder.put({"mtp.layers.0.self_attn.q_proj.weight_scale_inv": ("F32", (8, 2))})
    return folder


def unindexed() -> Folder:
    folder = small()
    folder.index = {k: f for f, found in folder.shards.items() if f != HEAD_SHARD for k in found}
    return folder


def undeclared() -> Folder:
    folder = small()
    folder.config["text_config"]["mtp_num_hidden_layers"] = 0
    return folder


def two_dtypes() -> Folder:
    folder = small()
    folder.head["mtp.fc.weight"] = ("F32", folder.head["mtp.fc.weight"][1])
    return folder


REPAIRED: dict[str, tuple[Callable[[], Folder], str]] = {
    "head-prefix": (lambda: checkpoint(qwen3_5(**SMALL), prefix="model.language_model."), "head-prefix"),
    "head-undeclared": (undeclared, "head-undeclared"),
    "count-mismatch": (lambda: checkpoint(qwen3_5(**SMALL, mtp=2), layers=1), "count-mismatch"),
    "shard-unindexed": (unindexed, "shard-unindexed"),
    "dtype-mixed": (two_dtypes, "dtype-mixed"),
    "scales-stale": (stale, "scales-stale"),
    "fp8 list": (fp8, "quant-unlisted"),
    "gptq": (lambda: small(quant_method="gptq", bits=4, group_size=128), "quant-unlisted"),
    "awq": (lambda: small(quant_method="awq", bits=4), "quant-unlisted"),
    "compressed-tensors": (lambda: small(**compressed([])), "quant-unlisted"),
    "unfused": (lambda: small(**compressed(LINEARS)), "quant-listed-unfused"),
    "divided": (lambda: small(**compressed([m for m in LINEARS if "v_proj" not in m])), "quant-fused-split"),
    "prefix": (lambda: small(**compressed([f"model.{m}" for m in LINEARS])), "prefix-mismatch"),
    "quark glob": (lambda: small(quant_method="quark", exclude=["lm_head", "mtp.*"]), "quant-runtime-name"),
    "experts stacked": (lambda: checkpoint(qwen3_5_moe(64, 4, 16, 4), experts="grouped"), "experts-grouped"),
}


@pytest.mark.parametrize("case", REPAIRED)
def test_the_command_of_a_finding_removes_it(case: str, tmp_path: Path) -> None:
    build, code = REPAIRED[case]
    report = ask(build(), tmp_path / "broken")
    finding = next(f for f in report.findings if f.code == code)
    assert finding.fix == f"{finding.advice}: {finding.command}"
    with pytest.raises(SystemExit) as stop:
        cli.main([w if w != "OUT" else str(tmp_path / "out") for w in shlex.split(finding.command)[1:]])
    assert stop.value.code == 0
    after = examine(open_checkpoint(tmp_path / "out"))
    assert codes(after) == {}
    assert after.facts.complete
    assert {after.engines[e].verdict for e in ("sglang", "vllm")} == {"works"}


def reports(root: Path) -> Iterator[Report]:
    """Reports that hold every kind of finding that a folder can show."""
    broken = [getattr(cases, n) for n in dir(cases) if n.startswith("report_")]
    folders = [build(True) for build in broken] + [build() for build, _ in REPAIRED.values()]
    folders += [cases.report_12(True, mixed=True), cases.report_05(True, grafted=True)]
    lost = small()
    lost.drop(lambda k: k == "mtp.fc.weight")
    odd = small()
    odd.put({"mtp.extra.weight": ("BF16", (8, 8))})
    drafter = small()
    drafter.put({"mtp.0.main_proj.weight": ("BF16", (8, 8))})
    denied = small()
    denied.config["text_config"]["mtp_num_hidden_layers"] = 0
    denied.drop(lambda k: k.startswith("mtp."))
    both = checkpoint(qwen3_5_moe(64, 4, 16, 4))
    both.head.update(checkpoint(qwen3_5_moe(64, 4, 16, 4), experts="grouped").head)
    exempt = small(quant_method="fp8", modules_to_not_convert=LINEARS)
    exempt.head["mtp.fc.weight"] = ("F8_E4M3", exempt.head["mtp.fc.weight"][1])
    bare = small()
    bare.head["mtp.fc.weight"] = ("F8_E4M3", bare.head["mtp.fc.weight"][1])
    named = checkpoint(qwen3_next(4))
    named.config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mtp.*": {}}}
    conflict = small(quant_method="modelopt", quant_algo="NVFP4", ignore=["mtp*"])
    conflict.extra["hf_quant_config.json"] = cases.modelopt(["mtp.layers.0*"])
    alone = small()
    del alone.shards[TRUNK_SHARD]
    doubled = small()
    doubled.put({"mtp.fc.weight": doubled.head["mtp.fc.weight"]}, TRUNK_SHARD)
    gone = small()
    folders += [lost, odd, drafter, denied, both, exempt, bare, named, conflict, alone, doubled]
    for at, folder in enumerate(folders):
        yield ask(folder, root / f"a folder {at}")
    gone.write(root / "gone")
    (root / "gone" / HEAD_SHARD).unlink()
    yield examine(open_checkpoint(root / "gone"))
    (root / "gone" / HEAD_SHARD).write_bytes(b"short")
    yield examine(open_checkpoint(root / "gone"))
    (root / "empty").mkdir()
    (root / "empty" / "config.json").write_bytes((root / "gone" / "config.json").read_bytes())
    yield examine(open_checkpoint(root / "empty"))
    yield examine(open_checkpoint(root / "gone" / TRUNK_SHARD))
    yield examine(open_checkpoint(root / "gone"), {"sglang": "0.5.15", "llamacpp": "b10742"})


def check(command: str, places: set[str]) -> None:
    """A command's programs are known; one of nextn's own parses, and names nothing but places and placeholders."""
    for part in command.split(" && "):
        words = shlex.split(part)
        if words[0] != "nextn":
            assert words[0] in PROGRAMS, command
            continue
        name, arguments = words[1], words[2:]
        assert name in cli.COMMANDS, command
        if name == "train":
            read_settings(arguments)
            continue
        group = typer.main.get_command(cli.build(name))
        parsed = group.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
        for value in parsed.params.values():
            if isinstance(value, (str, Path)) and re.search(r"[/A-Z]", str(value)) and " upon " not in str(value):
                assert str(value) in places | PLACEHOLDERS, command
        assert not command.endswith("."), command


def test_every_command_that_is_printed_can_be_run(tmp_path: Path) -> None:
    seen: set[str] = set()
    checked = 0
    for report in reports(tmp_path):
        place = report.case.place
        for finding in report.findings:
            seen.add(finding.code)
            if finding.command:
                check(finding.command, {place, f"{place}/hf_quant_config.json"})
                checked += finding.command.startswith("nextn")
                assert finding.fix.endswith(f": {finding.command}")
            else:
                assert finding.fix.endswith("."), finding
            assert not finding.advice.endswith(":")
        for verdict in report.engines.values():
            if verdict.command.startswith("nextn"):
                check(verdict.command, {place})
    assert checked > 40
    assert len(seen) > 28, seen


def test_a_head_that_extract_wrote_is_clean(tmp_path: Path) -> None:
    source = open_checkpoint(checkpoint(qwen3_5(64, 128, 4, 1, 1, 4)).write(tmp_path / "model"))
    write(plan_extract(source, tmp_path / "head"), lambda moved: None)
    for named in (tmp_path / "head", tmp_path / "head" / "model.safetensors"):
        report = examine(open_checkpoint(named))
        assert codes(report) == {"head-alone": "info"}
        assert report.facts.complete
        assert f"--speculative-draft-model-path {tmp_path / 'head'} " in report.engines["sglang"].command
        assert report.engines["nextn"].command.startswith(f"nextn generate BASE --head {tmp_path / 'head'} ")


def test_lists_in_fixes_are_whole_and_valid(tmp_path: Path) -> None:
    report = ask(fp8(), tmp_path)
    fix = next(f.fix for f in report.findings if f.code == "quant-unlisted")
    listed = re.search(r'Add ("modules_to_not_convert": \[.*?\]) to config.json', fix)
    assert listed is not None
    assert json.loads(f"{{{listed[1]}}}") == {"modules_to_not_convert": [*ATTENTION, *MLP]}


def test_experts_are_exempted_as_the_one_module_that_holds_them(tmp_path: Path) -> None:
    folder = checkpoint(qwen3_5_moe(64, 16, 16, 4))
    folder.config["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": ["mtp.fc", *ATTENTION]}
    fix = next(f.fix for f in ask(folder, tmp_path).findings if f.code == "quant-unlisted")
    assert '"mtp.layers.0.mlp.experts"' in fix
    assert "experts.0" not in fix


def test_a_hub_repository_is_downloaded_before_it_is_repaired(tmp_path: Path) -> None:
    listed = open_checkpoint(cases.report_01(True).write(tmp_path))
    listed.source, listed.root = "org/model", None
    report = examine(listed)
    assert report.findings[0].command == "hf download org/model --local-dir model && nextn merge model BASE OUT"
    commands = {name: v.command for name, v in report.engines.items()}
    assert commands["llamacpp"].startswith("python convert_hf_to_gguf.py --remote org/model ")
    assert commands["vllm"].startswith("vllm serve org/model ")


def test_one_shard_of_a_checkpoint_is_not_a_head_alone(tmp_path: Path) -> None:
    root = cases.report_01(False).write(tmp_path)
    report = examine(open_checkpoint(root / HEAD_SHARD))
    assert codes(report) == {"one-file": "info"}
    assert report.findings[0].command == f"nextn inspect {root}"
    assert f"--model-path {root} " in report.engines["sglang"].command
    assert "draft-model-path" not in report.engines["sglang"].command
