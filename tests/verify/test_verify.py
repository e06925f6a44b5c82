"""Verification: the contract's verdict, what an engine's worker reports, the probe against planted mistakes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nextn.assets import embedded_model
from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from nextn.inspect.facts import gather
from nextn.models.blocks import RMSNorm
from nextn.models.decoder import Decoder
from nextn.models.load import load_decoder
from nextn.train.acceptance import Counts
from nextn.train.unroll import unrolled_logits
from nextn.verify import engine as engine_check
from nextn.verify.command import verify
from nextn.verify.contract import check_contract
from nextn.verify.engine import LoadCheck, check_load
from nextn.verify.probe import (
    compare,
    documents,
    made,
    mistakes,
    probe,
    randomised,
    swapped,
    target_states_of,
    unrolled,
)
from tests.fixtures import checkpoint
from tests.surgery.builder import headless, tiny_qwen3_5, tiny_qwen3_next, write


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nextn.cli", "verify", *arguments], capture_output=True, text=True, check=False
    )


def test_the_contract_passes_a_whole_head_and_names_what_is_missing_of_another(tmp_path: Path) -> None:
    whole = check_contract(open_checkpoint(write(checkpoint(tiny_qwen3_5()), tmp_path / "whole", 1)))
    assert whole.passed
    assert whole.problems == ()
    partial = checkpoint(tiny_qwen3_5())
    partial.drop(lambda k: k == "mtp.fc.weight")
    found = check_contract(open_checkpoint(write(partial, tmp_path / "partial", 1)))
    assert not found.passed
    assert [p.code for p in found.problems] == ["head-partial"]
    assert found.as_json()["missing"] == ["mtp.fc.weight"]
    none = check_contract(open_checkpoint(write(headless(tiny_qwen3_5()), tmp_path / "none", 1)))
    assert [p.code for p in none.problems] == ["head-missing"]


def test_exit_codes_and_json(tmp_path: Path) -> None:
    write(checkpoint(tiny_qwen3_5()), tmp_path / "whole", 1)
    write(headless(tiny_qwen3_5()), tmp_path / "none", 1)
    done = run(str(tmp_path / "whole"), "--json")
    assert done.returncode == 0
    value = json.loads(done.stdout)
    assert (value["verdict"], value["family"], value["load"], value["probe"]) == ("passed", "qwen3_5", None, None)
    assert value["contract"]["found"] == value["contract"]["expected"] == 15
    assert run(str(tmp_path / "none")).returncode == 1
    absent = run(str(tmp_path / "whole"), "--engine", "sglang", "--engine-python", str(tmp_path / "python"))
    assert absent.returncode == 2
    assert "unavailable" in absent.stdout
    wrong = run(str(tmp_path / "whole"), "--engine", "nothing")
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


def test_nextn_itself_loads_what_passes_and_refuses_what_does_not(tmp_path: Path) -> None:
    facts = gather(open_checkpoint(embedded_model()))
    good = check_load(facts, "nextn")
    assert (good.status, good.survivors) == ("passed", ())
    partial = checkpoint(tiny_qwen3_5())
    partial.drop(lambda k: k == "mtp.norm.weight")
    bad = check_load(gather(open_checkpoint(write(partial, tmp_path / "partial", 1))), "nextn")
    assert bad.status == "failed"
    assert "mtp.norm.weight" in bad.detail


WORKER = """
import json, sys
model, result, expected = sys.argv[1:4]
keys = json.load(open(expected))
assert list(keys)[0] == "mtp.fc.weight", list(keys)[:2]
if {raises}:
    raise ValueError("no such device")
json.dump(dict(engine="sglang", version="9", **{{"class": "Head"}}, parameters=["fc.weight", "norm.weight"],
    error={error}, warnings=["skipped"], from_target=["lm_head.weight"], stubs=dict(),
    survivors=[dict(parameter="fc.weight", shape=[2], share=1.0, keys=["mtp.fc.weight"])][:{left}]), open(result, "w"))
"""


@pytest.mark.parametrize(
    "raises, error, left, status, said",
    [
        (False, None, 0, "passed", "every parameter of Head"),
        (False, None, 1, "failed", "left 1 parameters"),
        (False, "KeyError: 'x'", 0, "failed", "raised KeyError: 'x'"),
        (True, None, 0, "unavailable", "could not build its class on this machine: ValueError: no such device"),
    ],
)
def test_what_a_worker_reports_is_the_verdict(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raises: bool,
    error: str | None,
    left: int,
    status: str,
    said: str,
) -> None:
    """The missing key is offered first, and a survivor is reported under both its names."""
    partial = checkpoint(tiny_qwen3_5())
    partial.drop(lambda k: k == "mtp.fc.weight")
    facts = gather(open_checkpoint(write(partial, tmp_path / "partial", 1)))
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(raises=raises, error=repr(error), left=left))
    monkeypatch.setitem(engine_check.WORKERS, "sglang", str(worker))
    monkeypatch.setattr(engine_check, "_lacks", lambda python, engine: "")
    found = check_load(facts, "sglang")
    assert found.status == status
    assert said in found.detail
    if left:
        assert (found.survivors[0].parameter, found.survivors[0].keys) == ("fc.weight", ("mtp.fc.weight",))
        assert found.as_json()["from_target"] == ["lm_head.weight"]


def test_engines_that_cannot_be_asked_say_so(tmp_path: Path) -> None:
    facts = gather(open_checkpoint(write(checkpoint(tiny_qwen3_5()), tmp_path / "whole", 1)))
    found = check_load(facts, "transformers")
    assert isinstance(found, LoadCheck)
    assert found.status == "unavailable"
    absent = check_load(facts, "sglang", str(tmp_path / "no-python"))
    assert absent.status == "unavailable"
    assert "--engine-python" in absent.detail


@pytest.fixture(scope="module")
def tiny() -> Decoder:
    model, _ = load_decoder(open_checkpoint(embedded_model()), dtype=torch.float32, device=torch.device("cpu"))
    return model


@pytest.fixture(scope="module")
def text() -> list[int]:
    """Token ids of this repository's own kind of text."""
    from nextn.engine.text import load_tokenizer

    tokenizer = load_tokenizer(embedded_model())
    assert tokenizer is not None
    return tokenizer.encode(Path(json.__file__).read_text())[:480]


def test_a_healthy_head_beats_its_controls(tiny: Decoder, text: list[int]) -> None:
    before = {k: v.clone() for k, v in tiny.state_dict().items()}
    found = probe(tiny, text, 2)
    assert found.passed
    assert found.tokens > 400
    assert [c.name for c in found.controls] == [
        "swapped", "other_norm", "shifted", "random", "no_embedding", "no_hidden", "no_attention", "norms_swapped",
    ]  # fmt: skip
    by_name = {c.name: c.judgement for c in found.controls}
    assert [by_name[n] for n in ("swapped", "shifted", "random", "no_embedding", "no_hidden")] == ["worse"] * 5
    assert by_name["no_attention"] == "worse"
    assert found.warnings == ()
    assert found.head.acceptance[0] > 0.3
    after = tiny.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items())


def test_a_swapped_head_is_found_out_by_the_control_that_swaps_it_back(tiny: Decoder, text: list[int]) -> None:
    with swapped(tiny):
        found = probe(tiny, text, 1)
    assert not found.passed
    assert {c.name: c.judgement for c in found.controls}["swapped"] == "better"
    assert "swapped" in found.as_json()["suspects"]


def _weights(model: Decoder, *names: str) -> list[torch.nn.Parameter]:
    assert model.mtp is not None
    return [p for n, p in model.mtp.named_parameters() if any(w in n for w in names)]


def _forget_scales(model: Decoder) -> None:
    """Norms keep 1 + w while their weights are frozen."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module._scale = None


@pytest.mark.parametrize(
    "damage, suspect",
    [
        ("hidden norm lost", "no_hidden"),
        ("embedding norm lost", "no_embedding"),
        ("hidden half of the fusion lost", "no_hidden"),
        ("attention at random", "no_attention"),
    ],
)
def test_a_head_with_a_dead_part_is_found_out_by_the_control_without_it(
    tiny: Decoder, text: list[int], damage: str, suspect: str
) -> None:
    assert tiny.mtp is not None
    kept = {k: v.clone() for k, v in tiny.mtp.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        if damage.endswith("norm lost"):
            (norm,) = _weights(tiny, "hidden_norm" if damage.startswith("hidden") else "embed_norm")
            norm.fill_(-1)
        elif damage.startswith("hidden half"):
            (fuse,) = _weights(tiny, "fuse.")
            fuse[:, tiny.config.hidden :] = 0
        else:
            for p in _weights(tiny, ".attn."):
                if p.ndim > 1:
                    p.copy_(torch.randn(p.shape, generator=generator) * p.std())
    _forget_scales(tiny)
    try:
        found = probe(tiny, text, 1)
    finally:
        tiny.mtp.load_state_dict(kept)
        _forget_scales(tiny)
    assert not found.passed
    assert suspect in [c.name for c in found.suspects]


def test_controls_without_a_part_give_what_a_head_without_it_gives(tiny: Decoder, text: list[int]) -> None:
    """Blanking an input equals a fusion whose weights for it are zero."""
    (batch,) = documents(text[:120])
    states = target_states_of(tiny, batch)
    (fuse,) = _weights(tiny, "fuse.")
    kept, half = fuse.detach().clone(), tiny.config.hidden
    for mistake, columns in (("no_embedding", slice(0, half)), ("no_hidden", slice(half, 2 * half))):
        with made(tiny, mistake):
            blanked = unrolled(tiny, batch, 2, states, mistake)
        with torch.no_grad():
            fuse[:, columns] = 0
            zeroed = unrolled(tiny, batch, 2, states, "")
            fuse.copy_(kept)
        for ours, theirs in zip(blanked.outputs, zeroed.outputs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_norms_in_each_others_place_are_put_back(tiny: Decoder, text: list[int]) -> None:
    (batch,) = documents(text[:120])
    states = target_states_of(tiny, batch)
    right = unrolled(tiny, batch, 1, states, "").outputs[0]
    with made(tiny, "norms_swapped"):
        wrong = unrolled(tiny, batch, 1, states, "norms_swapped").outputs[0]
    assert not torch.equal(right, wrong)
    assert torch.equal(unrolled(tiny, batch, 1, states, "").outputs[0], right)


def test_a_head_that_holds_nan_fails_by_the_tensors_name(tmp_path: Path, text: list[int]) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(embedded_model(), tmp_path / "nan")
    weights = load_file(tmp_path / "nan" / "model.safetensors")
    weights["mtp.fc.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "nan" / "model.safetensors", {"format": "pt"})
    (tmp_path / "ids.json").write_text(json.dumps(text[:100]))
    done = run(str(tmp_path / "nan"), "--probe", str(tmp_path / "ids.json"))
    assert done.returncode == 1, done.stderr
    assert "values-nonfinite" in done.stdout
    assert "mtp.fc.weight" in done.stdout


def test_a_weak_head_is_warned_about(tiny: Decoder, text: list[int]) -> None:
    with randomised(tiny, seed=5):
        found = probe(tiny, text, 1)
    assert any("of first drafts are accepted" in w for w in found.warnings)
    assert found.as_json()["warnings"] == list(found.warnings)


def test_a_head_of_noise_beats_nothing(tiny: Decoder, text: list[int]) -> None:
    with randomised(tiny, seed=5):
        found = probe(tiny, text, 1)
    assert not found.passed
    assert "random" in [c.name for c in found.suspects]


def test_the_other_norm_is_what_a_family_of_the_other_kind_would_feed(tiny: Decoder, text: list[int]) -> None:
    (batch,) = documents(text[:200])
    states = target_states_of(tiny, batch)
    right = unrolled(tiny, batch, 2, states, "")
    wrong = unrolled(tiny, batch, 2, states, "other_norm")
    assert mistakes(tiny)["other_norm"].startswith("the target's hidden state is taken before")
    config = tiny.config
    tiny.config = replace(config, family=replace(config.family, target_hidden="pre_norm"))
    try:
        flipped = unrolled_logits(tiny, batch, 2)
        assert mistakes(tiny)["other_norm"].startswith("the target's hidden state is taken after")
    finally:
        tiny.config = config
    for ours, theirs, healthy in zip(wrong.outputs, flipped.outputs, right.outputs, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, healthy)
    assert torch.equal(right.outputs[1], unrolled_logits(tiny, batch, 2).outputs[1])
    shifted = unrolled(tiny, batch, 2, states, "shifted")
    assert torch.equal(shifted.teacher[0, :-1], right.teacher[0, 1:])


@pytest.mark.parametrize(
    "control, healthy, rounds, expected",
    [(0, 50, 100, "worse"), (50, 50, 100, "same"), (60, 50, 100, "same"), (90, 50, 100, "better"), (0, 0, 9, "same")],
)
def test_shares_are_compared_by_their_spread(control: int, healthy: int, rounds: int, expected: str) -> None:
    assert compare(Counts(rounds, [float(control)]), Counts(rounds, [float(healthy)])) == expected


def test_a_text_too_short_to_say_anything_is_refused() -> None:
    with pytest.raises(NextnError, match="31 tokens"):
        documents(list(range(31)))
    cut = documents(list(range(1030)))
    assert [batch.ids.shape[1] for batch in cut] == [512, 512]
    assert cut[1].ids[0, 0] == 512
    assert int(cut[1].positions[0, 0]) == 0


def test_the_probe_drafts_from_the_ids_that_the_head_names(tmp_path: Path, text: list[int], tiny: Decoder) -> None:
    whole, few = probe(tiny, text, 2), probe(tiny, text, 2, range(0, tiny.config.vocab, 2))
    assert (whole.draft_vocab, few.draft_vocab) == (None, tiny.config.vocab // 2)
    assert few.head.kept[0] < whole.head.kept[0]
    folder = tmp_path / "model"
    shutil.copytree(embedded_model(), folder)
    (folder / "draft_vocab.json").write_text(json.dumps({"ids": list(range(0, tiny.config.vocab, 2))}))
    (tmp_path / "ids.json").write_text(json.dumps(text))
    said = run(str(folder), "--probe", str(tmp_path / "ids.json"), "-k", "2", "--device", "cpu")
    assert f"drafts from the {tiny.config.vocab // 2:,} ids that the head names" in said.stdout
    assert f"{few.head.acceptance[0]:.3f}  {few.head.acceptance[1]:.3f}" in said.stdout


def test_the_command_probes_text_and_ids(tmp_path: Path, text: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(text[:600]))
    options: dict[str, Any] = {"engine": None, "engine_python": None, "draft_tokens": 1, "tokens": 600}
    options |= {"device": "cpu", "revision": None, "token": None}
    verify(str(embedded_model()), probe=tmp_path / "ids.json", json=True, **options)
    value = json.loads(capsys.readouterr().out)
    assert value["probe"]["passed"]
    assert value["probe"]["draft_tokens"] == 1
    (tmp_path / "bad.json").write_text("[1, -2]")
    with pytest.raises(NextnError, match="token ids"):
        verify(str(embedded_model()), probe=tmp_path / "bad.json", json=True, **options)


def test_engines_that_would_fail_are_warned_about(tmp_path: Path) -> None:
    """The list exempts the head's checkpoint names, and SGLang builds Qwen3-Next's head under the target's."""
    folder = checkpoint(tiny_qwen3_next())
    folder.config["quantization_config"] = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["mtp"]}
    found = check_contract(open_checkpoint(write(folder, tmp_path / "awq", 1)))
    (note,) = [n for n in found.engines if n.startswith("SGLang")]
    assert "fails (quant-runtime-name)" in note
    done = run(str(tmp_path / "awq"))
    assert f"warning: {note}" in done.stdout
    assert check_contract(open_checkpoint(write(checkpoint(tiny_qwen3_5()), tmp_path / "whole", 1))).engines == ()


def test_the_last_words_of_an_engine_that_died_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import sys\nfor n in range(30):\n    print('line', n, file=sys.stderr)\nsys.exit(3)\n")
    monkeypatch.setitem(engine_check.WORKERS, "sglang", str(worker))
    monkeypatch.setattr(engine_check, "_lacks", lambda python, engine: "")
    found = check_load(gather(open_checkpoint(embedded_model())), "sglang")
    assert found.detail.endswith("on this machine: line 29")
    assert found.warnings == tuple(f"line {n}" for n in range(18, 29))
