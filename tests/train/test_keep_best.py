"""A head that was there before counts among those that a run chooses from; what no step beats is not replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nextn import cli
from nextn.train.config import TrainConfig
from tests.train import runs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a head that was trained on the held-out text's kind, and a rate that ruins it."""
    folder = tmp_path_factory.mktemp("best")
    runs.target(folder / "bare", "qwen3_5")
    runs.data(folder / "data.jsonl", repeat=True)
    runs.data(folder / "eval.jsonl", lines=8, seed=5, repeat=True)
    made = runs.config(folder, folder / "bare", steps=40, merge=str(folder / "model"), output=str(folder / "good"))
    runs.trainer(made).run()
    return folder


def ruinous(root: Path, output: Path, model: str = "model", **values: Any) -> TrainConfig:
    options = {"steps": 4, "eval_every": 2, "save": 2, "lr": 1.0, "schedule": "constant", "eval_draft_tokens": 2}
    given = {**options, "eval": str(root / "eval.jsonl"), "output": str(output), **values}
    return runs.config(root, root / model, **given)


def call(made: TrainConfig, *options: str) -> int:
    words = [f"{k}={json.dumps(v)}" for k, v in made.model_dump(exclude_none=True).items()]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *words, *options])
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return code or 0


def test_nothing_is_exported_where_no_step_beats_the_start(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, one sentence, the facts as JSON, and neither a head nor a merged checkpoint."""
    made = ruinous(root, tmp_path / "head", merge=str(tmp_path / "merged"))
    assert call(made, "--json") == 1
    said = capsys.readouterr()
    facts = json.loads(said.out)
    found = runs.evaluations(made)
    assert max(found[2], found[4]) < found[0]
    assert (facts["best_step"], facts["exported_step"], facts["merged"]) == (0, None, None)
    assert facts["before"]["accept_length"] == found[0]
    assert facts["after"]["accept_length"] == max(found[2], found[4])
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"accept length {found[0]:.3f}, {max(found[2], found[4]):.3f} at best" in errors[0]
    assert "checkpoints/step-4" in errors[0]
    assert (tmp_path / "head" / "checkpoints" / "step-4").is_dir()
    assert not (tmp_path / "merged").exists()
    assert not list((tmp_path / "head").glob("*.safetensors"))
    assert "No step is accepted more than the head" in (tmp_path / "head" / "report.html").read_text()


def test_the_last_step_is_exported_on_demand(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command with keep_best=false takes no step more."""
    assert call(ruinous(root, tmp_path / "head")) == 1
    assert "head: " not in capsys.readouterr().out
    assert call(ruinous(root, tmp_path / "head", keep_best=False), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    found = runs.evaluations(ruinous(root, tmp_path / "head"))
    assert (facts["best_step"], facts["exported_step"], facts["steps"]) == (0, 4, 4)
    assert facts["after"]["accept_length"] == found[4]
    whole = runs.trainer(ruinous(root, tmp_path / "other", keep_best=False, eval=None))
    whole.run()
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "other"))
    assert all(torch.equal(mine[k], theirs[k]) for k in theirs)


def test_a_step_that_beats_the_start_is_exported(root: Path, tmp_path: Path) -> None:
    made = ruinous(root, tmp_path / "head", model="bare", steps=30, lr=0.01)
    facts = runs.trainer(made).run()
    found = runs.evaluations(made)
    best = max((s for s in found if s), key=lambda s: found[s])
    assert found[best] > found[0]
    assert facts["best_step"] == facts["exported_step"] == best
    assert "No step is accepted" not in (tmp_path / "head" / "report.html").read_text()


def test_a_head_from_scratch_has_nothing_to_beat(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it begins with is no head that anyone had: the best step is exported even where it is worse."""
    assert call(ruinous(root, tmp_path / "head", init="scratch", lr=3.0), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    found = runs.evaluations(ruinous(root, tmp_path / "head"))
    assert max(found[2], found[4]) <= found[0]
    assert facts["exported_step"] == facts["best_step"] == max((2, 4), key=lambda s: found[s])
    assert (tmp_path / "head" / "model.safetensors").is_file()
    assert call(ruinous(root, tmp_path / "head", init="scratch", lr=3.0)) == 0
    said = capsys.readouterr().out
    assert "accepted no more than the untrained one that it began as" in said
    assert "the one it started from" not in said
    assert "more than the head was before the first." in (tmp_path / "head" / "report.html").read_text()


def test_a_reduced_vocabulary_competes_with_the_head_drafting_from_it(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before is the head as it was, judged by `nextn eval`; what steps must beat is that head with the run's ids."""
    made = ruinous(root, tmp_path / "head", lr=1e-9, draft_vocab=12, keep_best=False)
    assert call(made, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    before, limited, after = (facts[name]["accept_length"] for name in ("before", "before_limited", "after"))
    options = ["--data", str(root / "eval.jsonl"), "--tokens", str(made.eval_tokens), "-k", "2", "--json"]
    options += ["--batch-tokens", str(made.batch_tokens), "--max-length", str(made.max_length)]
    judged = []
    for more in (["--draft-vocab", "full"], ["--draft-vocab", str(tmp_path / "head" / "draft_vocab.json")]):
        with pytest.raises(SystemExit):
            cli.main(["eval", str(root / "model"), *options, *more])
        judged.append(json.loads(capsys.readouterr().out)["accept_length"])
    assert (before, limited) == (pytest.approx(judged[0], abs=1e-12), pytest.approx(judged[1], abs=1e-12))
    assert limited < before
    assert after == pytest.approx(limited, abs=0.05)
    assert "from these it was accepted" in (tmp_path / "head" / "report.html").read_text()
    # Going on from that head, the ids are its own: nothing is judged twice.
    again = ruinous(root, tmp_path / "again", init=str(tmp_path / "head"), keep_best=False)
    assert call(again, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["before_limited"] is None
    assert facts["before"]["accept_length"] == pytest.approx(after, abs=1e-12)
