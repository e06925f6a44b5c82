"""`nextn inspect` as a user meets it: keys, exit codes, options, the screen, and errors in two sentences."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nextn import cli
from nextn.checkpoint.source import open_checkpoint
from nextn.inspect.command import _progress
from nextn.inspect.engines.versions import ENGINES
from tests.checkpoint.test_hub import REPO, Server
from tests.checkpoint.test_hub import server as server
from tests.families.published import PUBLISHED
from tests.fixtures import HEAD_SHARD, TRUNK_SHARD, Folder, checkpoint, qwen3_5, qwen3_5_moe
from tests.inspect import cases
from tests.inspect.test_families import folder_of

KEYS = {
    "source", "family", "architectures", "declared_layers", "declared_by", "heads_found", "complete", "tensors",
    "dtypes", "quantization", "findings", "engines",
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", *arguments])
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out, printed.err


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_json_has_every_key_of_the_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = cases.report_01(False).write(tmp_path)
    code, got = answer(capsys, str(root))
    assert code == 0
    assert set(got) >= KEYS
    assert got["source"] == str(root)
    assert got["family"] == "qwen3_5"
    assert got["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert (got["declared_layers"], got["declared_by"]) == (1, "text_config.mtp_num_hidden_layers")
    assert got["heads_found"] == 1
    assert got["complete"] is True
    stored = sum(t.nbytes for k, t in open_checkpoint(root).tensors.items() if k.startswith("mtp."))
    assert got["tensors"] == {"expected": 15, "found": 15, "missing": [], "unexpected": [], "bytes": stored}
    assert got["dtypes"] == {"BF16": 15}
    assert got["quantization"]["method"] is None
    assert got["quantization"]["head"] == "none"
    assert got["findings"] == []
    assert list(got["engines"]) == list(ENGINES)
    assert all({"verdict", "reasons", "command"} <= set(v) for v in got["engines"].values())


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean = str(cases.report_01(False).write(tmp_path / "clean"))
    lost = str(cases.report_01(True).write(tmp_path / "lost"))
    unfused = str(cases.report_09(True).write(tmp_path / "unfused"))
    assert run(capsys, clean)[0] == 0
    assert run(capsys, clean, "--strict")[0] == 0
    assert run(capsys, lost)[0] == 1
    assert run(capsys, unfused)[0] == 0
    assert run(capsys, unfused, "--strict")[0] == 1
    assert run(capsys, clean, "--engine", "vllm")[0] == 0
    assert run(capsys, clean, "--engine", "transformers")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/folder"], "neither a folder"),
        ([""], "source is empty"),
        (["{}", "--engine", "sglang=0.5.17"], "sglang==0.5.17"),
        (["{}", "--engine", "sglang>=0.5.17"], "sglang==0.5.17"),
        (["{}", "--engine", "tgi"], "names no engine"),
        (["{}", "--engine", "vllm==new"], "names no version"),
    ],
)
def test_bad_usage_is_two_sentences(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = cases.report_01(False).write(tmp_path)
    code, out, err = run(capsys, *(a.format(root) for a in arguments))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 2


def test_an_engine_version_changes_its_verdict_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(cases.report_09(True).write(tmp_path))
    _, new = answer(capsys, root)
    _, old = answer(capsys, root, "--engine", "sglang==0.5.17")
    assert (new["engines"]["sglang"]["verdict"], old["engines"]["sglang"]["verdict"]) == ("works", "degraded")
    assert old["engines"]["sglang"]["version"] == "0.5.17"
    assert old["engines"]["vllm"] == new["engines"]["vllm"]


@pytest.mark.parametrize(
    ("engine", "hybrid", "verdict"),
    [
        ("llamacpp==b9179", True, "unsupported"),
        ("llamacpp==b9180", True, "works"),
        ("llamacpp==b10742", True, "fails"),
        ("llamacpp==b10744", True, "works"),
        ("transformers==5.13", False, "unsupported"),
        ("sglang==0.5.15", True, "works"),
        ("sglang==0.5.16", True, "works"),
    ],
)
def test_version_ranges(
    engine: str, hybrid: bool, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(cases.report_01(False).write(tmp_path))
    _, got = answer(capsys, root, "--engine", engine)
    assert got["engines"][engine.partition("==")[0]]["verdict"] == verdict


def test_the_screen_says_the_verdict_first_and_commands_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root = str(cases.report_08(True).write(tmp_path))
    code, out, _ = run(capsys, root)
    lines = out.splitlines()
    assert code == 1
    assert lines[0].startswith("Qwen3.5 MoE: a complete MTP head")
    assert "1 error" in lines[0]
    assert any(line.startswith("error quant-unlisted: ") for line in lines)
    assert any(line.startswith("    fix: ") and "mtp*" in line for line in lines)
    command = next(line.strip() for line in lines if "sglang.launch_server" in line)
    assert command == answer(capsys, root)[1]["engines"]["sglang"]["command"]
    assert command.endswith("--mamba-radix-cache-strategy extra_buffer")


def test_tensors_lists_every_stored_tensor_and_the_rule_that_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = cases.report_13(True).write(tmp_path)
    _, got = answer(capsys, str(root), "--tensors")
    table = {entry["key"]: entry for entry in got["tensor_map"]}
    stored = {k: t for k, t in open_checkpoint(root).tensors.items() if k.startswith("mtp.")}
    assert set(table) == set(stored)
    assert all(tuple(table[k]["shape"]) == t.shape and table[k]["bytes"] == t.nbytes for k, t in stored.items())
    fc = table["mtp.fc.weight"]
    assert (fc["name"], fc["stored"], fc["claimed"], fc["rule"]) == ("mtp.0.fuse.weight", "full", "full", "mtp.fc")
    assert fc["file"] == HEAD_SHARD
    assert table["mtp.layers.0.self_attn.q_proj.weight_scale_inv"]["stored"] == "scale"
    assert table["mtp.norm.weight"]["claimed"] is None
    _, out, _ = run(capsys, str(root), "--tensors")
    assert all(key in out for key in stored)


def test_memory_counts_every_byte_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(checkpoint(qwen3_5_moe(experts=8)).write(tmp_path))
    _, one = answer(capsys, root)
    memory = one["memory"]
    assert sum(memory["parts"].values()) == one["tensors"]["bytes"] == memory["per_rank_bytes"]
    hidden, vocab, inter, experts = 2048, 248_320, 512, 8
    assert memory["parts"]["experts"] == 2 * experts * 3 * hidden * inter
    assert memory["parts"]["fusion"] == 2 * hidden * 2 * hidden
    assert memory["second_load"] == {
        "embedding_bytes": 2 * vocab * hidden,
        "output_head_bytes": 2 * vocab * hidden,
        "bytes": 4 * vocab * hidden,
        "per_rank_bytes": 4 * vocab * hidden,
    }
    _, four = answer(capsys, root, "--tp", "4")
    whole = memory["parts"]["norms"] + memory["parts"]["fusion"]
    keys_and_values = 2 * 2 * (2 * 256) * hidden
    rest = memory["per_rank_bytes"] - whole - keys_and_values
    assert four["memory"]["per_rank_bytes"] == whole + keys_and_values // 2 + rest // 4
    assert four["memory"]["second_load"]["per_rank_bytes"] == vocab * hidden


def test_copies_are_not_loaded_and_a_heads_own_output_is_no_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deepseek = folder_of(PUBLISHED["DeepSeek-V3"])
    plain = answer(capsys, str(deepseek.write(tmp_path / "plain")))[1]["memory"]
    hidden, vocab = 7168, 129_280
    deepseek.put(
        {f"model.layers.61.{k}.weight": ("BF16", (vocab, hidden)) for k in ("embed_tokens", "shared_head.head")}
    )
    copies = answer(capsys, str(deepseek.write(tmp_path / "copies")))[1]["memory"]
    assert copies["parts"]["copies"] == 2 * 2 * vocab * hidden
    assert copies["per_rank_bytes"] == plain["per_rank_bytes"]
    case = PUBLISHED["Step-3.5-Flash"]
    step = answer(capsys, str(folder_of(case).write(tmp_path / "step")))[1]["memory"]
    assert "copies" not in step["parts"]
    assert step["parts"]["output head"] == 3 * 2 * case.config["vocab_size"] * case.config["hidden_size"]
    assert step["second_load"]["output_head_bytes"] == 0


def test_diff_between_storages_compares_expert_by_expert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = qwen3_5_moe(hidden=64, experts=3, moe_inter=16, layers=4)
    split = checkpoint(config).write(tmp_path / "split")
    stacked = checkpoint(config, experts="grouped").write(tmp_path / "stacked")
    _, got = answer(capsys, str(split), "--diff", str(stacked))
    assert got["diff"]["identical"] is True
    assert len(got["diff"]["equal"]) == 17 + 9 == got["tensors"]["found"]
    info = open_checkpoint(stacked).tensors["mtp.layers.0.mlp.experts.gate_up_proj"]
    with (stacked / info.file).open("r+b") as file:
        file.seek(info.start + (1 * 32 + 16) * 64 * 2)
        file.write(b"\x80\x3f")
    _, got = answer(capsys, str(split), "--diff", str(stacked))
    assert [c["name"] for c in got["diff"]["changed"]] == ["mtp.0.block.moe.experts.1.up.weight"]
    _, out, _ = run(capsys, str(split), "--diff", str(stacked))
    assert "1 changed" in out


def test_diff_says_why_nothing_was_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = str(cases.report_01(True).write(tmp_path / "lost"))
    _, got = answer(capsys, lost, "--diff", lost)
    assert got["diff"]["identical"] is False
    assert got["diff"]["note"] == f"There is nothing to compare: {lost} holds no head."
    _, out, _ = run(capsys, lost, "--diff", lost)
    assert "There is nothing to compare" in out


def test_diff_of_an_unknown_family_goes_by_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(qwen3_5(64, 128, 4, 1, 1, 4))
    folder.config = {"model_type": "brand_new"}
    one, two = str(folder.write(tmp_path / "one")), folder.write(tmp_path / "two")
    _, got = answer(capsys, one, "--diff", str(two))
    assert got["diff"]["identical"] is True
    assert set(got["diff"]["equal"]) == set(folder.head)
    assert "family is unknown" in got["diff"]["note"]
    info = open_checkpoint(two).tensors["mtp.norm.weight"]
    with (two / info.file).open("r+b") as file:
        file.seek(info.start)
        file.write(b"\x80\x3f")
    _, got = answer(capsys, one, "--diff", str(two))
    assert [c["name"] for c in got["diff"]["changed"]] == ["mtp.norm.weight"]


def test_diff_says_by_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = qwen3_5(64, 128, 4, 1, 1, 4)
    roots = [checkpoint(small).write(tmp_path / n) for n in "ab"]
    for root, number in zip(roots, (b"\x80\x3f", b"\xa0\x3f"), strict=True):
        info = open_checkpoint(root).tensors["mtp.norm.weight"]
        with (root / info.file).open("r+b") as file:
            file.seek(info.start)
            file.write(number * 64)
    _, got = answer(capsys, str(roots[0]), "--diff", str(roots[1]))
    assert got["diff"]["changed"] == [
        {"name": "mtp.0.out_norm.weight", "key": "mtp.norm.weight", "other_key": "mtp.norm.weight", "relative": 0.25,
         "note": ""}
    ]  # fmt: skip


def test_a_single_file_is_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = cases.report_01(False).write(tmp_path)
    code, got = answer(capsys, str(root / HEAD_SHARD))
    assert code == 0
    assert got["complete"] is True


def tiny() -> Folder:
    """Small enough for a server that reads a file whole at each request."""
    config = qwen3_5_moe(hidden=64, experts=8, moe_inter=16, layers=4)
    config["text_config"]["vocab_size"] = 4096
    folder = checkpoint(config)
    folder.extra["hf_quant_config.json"] = cases.modelopt(["mtp.layers.0*"])
    return folder


def test_a_hub_repository_gives_the_same_answer(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny()
    folder.write(server.root)
    code, remote = answer(capsys, REPO)
    _, out, _ = run(capsys, REPO)
    _, local = answer(capsys, str(server.root))
    assert code == 1
    assert remote["source"] == REPO
    for key in KEYS - {"source", "engines", "findings"}:
        assert remote[key] == local[key], key
    assert [f["code"] for f in remote["findings"]] == ["quant-unlisted"]
    assert {e: v["verdict"] for e, v in remote["engines"].items()} == {
        e: v["verdict"] for e, v in local["engines"].items()
    }
    assert remote["remote"]["bytes_read"] < sum(t.nbytes for t in open_checkpoint(server.root).tensors.values()) / 2
    shard_requests = [path for path, asked, _ in server.seen if "resolve" in path and asked]
    assert len(shard_requests) == 2 * len(folder.shards), "one a shard for each of the two runs"
    assert "bytes in" in out


def test_a_hub_repository_with_a_shard_gone(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    tiny().write(server.root)
    (server.root / HEAD_SHARD).unlink()
    code, got = answer(capsys, REPO)
    assert code == 1
    assert [f["code"] for f in got["findings"]] == ["shard-missing"]


def test_values_of_a_hub_repository_are_refused(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    tiny().write(server.root)
    code, _, err = run(capsys, REPO, "--values")
    assert code == 2
    assert "not on this machine" in err


def test_inspect_starts_without_heavy_imports(tmp_path: Path) -> None:
    root = cases.report_01(False).write(tmp_path)
    program = (
        "import sys\nfrom nextn import cli\n"
        "try: cli.main(['inspect', sys.argv[1], '--json'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch','transformers','huggingface_hub','numpy') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(root)], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["complete"] is True


def test_the_trunk_shard_alone_has_no_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = cases.report_01(False).write(tmp_path)
    code, got = answer(capsys, str(root / TRUNK_SHARD))
    assert code == 1
    assert [f["code"] for f in got["findings"]] == ["head-missing", "one-file"]
    assert got["findings"][1]["command"] == f"nextn inspect {root}"


def test_names_from_files_cannot_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cases.report_01(False)
    folder.config["architectures"] = ["\x1b[2JQwen3_5ForConditionalGeneration"]
    folder.put({"mtp.\x1b]0;title\x07[red].weight": ("BF16", (4, 4))})
    root = folder.write(tmp_path / "a folder; with spaces")
    for options in ([], ["--tensors"]):
        code, out, err = run(capsys, str(root), *options)
        assert code in (0, 1)
        assert "\x1b" not in out + err
        assert "\x07" not in out + err
        assert "[red].weight" in out
    _, got = answer(capsys, str(root))
    assert got["engines"]["vllm"]["command"].startswith(f"vllm serve '{root}' ")


def test_a_number_keeps_its_unit_on_a_narrow_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(capsys, str(checkpoint(qwen3_5_moe(experts=8)).write(tmp_path)))
    lines = [line.rstrip() for line in out.splitlines()]
    assert any(line.endswith("MB,") for line in lines), "the memory facts take more than one line"
    assert not any(re.fullmatch(r"\s*(kB|MB|GB).*", line) for line in lines)


def test_progress_is_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 2.5, 3.0, 13.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    report = _progress("headers")
    for done in range(1, 5):
        report(done, 9)
    assert capsys.readouterr().err == "headers: 2 of 9\nheaders: 4 of 9\n"
