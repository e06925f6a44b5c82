"""Every family: a checkpoint with the published geometry is clean, whatever the storage of its experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.families.contract import ANY
from nextn.families.registry import family_geometry, find_family
from nextn.inspect.engines.versions import ENGINES
from nextn.inspect.examine import Report, examine
from tests.families.published import PUBLISHED, Published
from tests.fixtures import HEAD_SHARD, TRUNK_SHARD, Folder

CASES = [pytest.param(case, id=name) for name, case in PUBLISHED.items()]


def folder_of(case: Published, experts: str = "split") -> Folder:
    family = find_family(case.config)
    assert family is not None
    dims = family_geometry(family, case.config)
    head = {
        key: ("BF16", tuple(8 if n == ANY else n for n in shape))
        for _, key, shape, spec in family.expected(dims, case.heads, experts=experts)
        if not spec.optional
    }
    body = {"model.embed_tokens.weight": ("BF16", (dims.get("vocab", 8), dims["hidden"]))}
    config = {"architectures": [family.architectures[0]]} | case.config
    return Folder(config, {TRUNK_SHARD: body, HEAD_SHARD: head})


def ask(folder: Folder, root: Path) -> Report:
    return examine(open_checkpoint(folder.write(root)))


@pytest.mark.parametrize("case", CASES)
def test_published_heads_are_clean_and_whole(case: Published, tmp_path: Path) -> None:
    report = ask(folder_of(case), tmp_path)
    assert report.worst() in (None, "info"), report.findings
    assert report.facts.complete
    assert report.facts.family is not None
    assert report.facts.family.name == case.family
    assert report.facts.found == len(report.facts.expected) == case.tensors
    assert len(report.facts.layers) == case.heads
    assert set(report.engines) == set(ENGINES)
    assert all(v.verdict != "fails" for v in report.engines.values())


@pytest.mark.parametrize("case", [c for c in CASES if c.values[0].grouped is not None])
def test_stacked_experts_are_whole_too(case: Published, tmp_path: Path) -> None:
    report = ask(folder_of(case, "grouped"), tmp_path)
    assert {f.code for f in report.findings} - {"heads-unused"} == {"experts-grouped"}
    assert report.facts.complete
    assert report.facts.found == case.grouped


@pytest.mark.parametrize("case", CASES)
def test_a_lost_head_is_missed_where_the_config_or_the_family_promises_one(case: Published, tmp_path: Path) -> None:
    folder = folder_of(case)
    del folder.shards[HEAD_SHARD]
    report = ask(folder, tmp_path)
    assert {f.code: f.severity for f in report.findings} == {"head-missing": "error"}
    assert not report.facts.complete


@pytest.mark.parametrize("case", CASES)
def test_one_tensor_less_is_noticed(case: Published, tmp_path: Path) -> None:
    folder = folder_of(case)
    gone = next(iter(folder.head))
    del folder.head[gone]
    report = ask(folder, tmp_path)
    codes = {f.code for f in report.findings}
    assert report.facts.family is not None
    if report.facts.family.confidence == "full":
        assert report.facts.missing == (gone,)
        assert "head-partial" in codes
    else:
        assert report.facts.unsure == (gone,)
        assert "layout-unsure" in codes
        assert "head-partial" not in codes


def test_glm_4_5_ships_copies_that_4_6_omits(tmp_path: Path) -> None:
    case = PUBLISHED["GLM-4.6"]
    plain = folder_of(case)
    assert ask(plain, tmp_path / "4.6").findings == ()
    family = find_family(case.config)
    assert family is not None
    dims = family_geometry(family, case.config)
    copies = {
        key: ("BF16", shape)
        for name, key, shape, spec in family.expected(dims, 1)
        if spec.optional and shape == (dims["vocab"], dims["hidden"])
    }
    assert len(copies) == 2
    plain.put(copies)
    report = ask(plain, tmp_path / "4.5")
    assert [f.code for f in report.findings] == ["embedding-duplicated"]
    assert set(report.findings[0].tensors) == set(copies)
    assert report.facts.found == len(report.facts.expected) == case.tensors


def test_more_heads_than_an_engine_runs(tmp_path: Path) -> None:
    report = ask(folder_of(PUBLISHED["MiMo-V2-Flash"]), tmp_path)
    assert [(f.code, f.severity) for f in report.findings] == [("heads-unused", "info")]
    assert report.engines["vllm"].verdict == "degraded"
    assert report.engines["vllm"].reasons == ("heads-unused",)
    assert report.engines["sglang"].verdict == "works"


def test_mimo_takes_one_draft_token_in_vllm(tmp_path: Path) -> None:
    report = ask(folder_of(PUBLISHED["MiMo-7B"]), tmp_path)
    assert '"num_speculative_tokens":1' in report.engines["vllm"].command
    assert "--speculative-num-steps 3" in report.engines["sglang"].command


def test_chained_heads_get_one_draft_token_each(tmp_path: Path) -> None:
    report = ask(folder_of(PUBLISHED["Step-3.5-Flash"]), tmp_path)
    assert "--speculative-num-steps 3" in report.engines["sglang"].command
    assert "--speculative-num-draft-tokens 4" in report.engines["sglang"].command
    assert '"num_speculative_tokens":3' in report.engines["vllm"].command


def test_step_stops_at_missing_tensors_where_qwen_is_silent(tmp_path: Path) -> None:
    for name, verdict in (("Step-3.5-Flash", "fails"), ("Qwen3.5-27B", "degraded")):
        folder = folder_of(PUBLISHED[name])
        folder.head.pop(next(iter(folder.head)))
        assert ask(folder, tmp_path / name).engines["sglang"].verdict == verdict


def test_whether_an_engine_reads_stacked_experts_is_unknown_where_it_was_not_read(tmp_path: Path) -> None:
    report = ask(folder_of(PUBLISHED["DeepSeek-V3"], "grouped"), tmp_path)
    assert report.engines["sglang"].verdict == "unknown"
    assert report.engines["sglang"].reasons == ("experts-grouped",)


def test_a_second_config_spelling_gives_the_same_answer(tmp_path: Path) -> None:
    """transformers saves ``num_nextn_predict_layers`` as ``num_mtp_layers``."""
    case = PUBLISHED["DeepSeek-V3"]
    config = {k: v for k, v in case.config.items() if k != "num_nextn_predict_layers"} | {"num_mtp_layers": 1}
    report = ask(folder_of(replace(case, config=config)), tmp_path)
    assert report.findings == ()
    assert report.facts.declared_by == "num_mtp_layers"
