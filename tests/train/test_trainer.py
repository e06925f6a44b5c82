"""A run trains the head alone, refuses what cannot work, and leaves a head folder that other commands take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from nextn.models.blocks import RMSNorm
from nextn.models.decoder import Decoder
from nextn.models.load import load_decoder
from nextn.train import step as step_module
from nextn.train.config import load_config
from nextn.train.losses import chain_loss
from nextn.train.processes import Processes
from nextn.train.start import require_frozen, start
from tests.train import runs

CPU = torch.device("cpu")
ALONE = Processes(0, 1, CPU)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.target(tmp_path_factory.mktemp("hybrid") / "model", "qwen3_5")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.target(tmp_path_factory.mktemp("bare") / "model", "qwen3", head=False)


@pytest.fixture(autouse=True)
def some_data(tmp_path: Path) -> None:
    runs.data(tmp_path / "data.jsonl", repeat=True)


def head_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for k, v in load_file(folder / "model.safetensors").items() if k.startswith("mtp.")}


@pytest.mark.parametrize(("tied", "optimizer"), [(False, "adamw"), (True, "adamw"), (True, "muon")])
def test_only_the_head_is_trained(tmp_path: Path, tied: bool, optimizer: str) -> None:
    """No gradient, no optimiser state and no change outside the head, embedding and output head included."""
    model = runs.target(tmp_path / "model", "qwen3_5", tied=tied)
    made = runs.trainer(runs.config(tmp_path, model, optimizer=optimizer))
    target = made.begun.model
    head = {id(p) for p in made.begun.unroll.parameters()}
    others = {n: p for n, p in target.named_parameters() if id(p) not in head}
    before = {n: p.clone() for n, p in others.items()}
    first = {n: p.clone() for n, p in made.begun.unroll.named_parameters()}
    assert len(head) == len(list(target.mtp.parameters()))  # type: ignore[union-attr]
    made.step([made.source.take()])
    assert all(p.grad is None and not p.requires_grad for p in others.values())
    parts = made.step.optimisers
    listed = [id(p) for o in parts for g in o.param_groups for p in g["params"]]
    assert {id(p) for o in parts for p in o.state} == head == set(listed)
    assert len(listed) == len(head)
    assert all(torch.equal(p, before[n]) for n, p in others.items())
    assert all(not torch.equal(p, first[n]) for n, p in made.begun.unroll.named_parameters())


@pytest.mark.parametrize("loss", ["ce", "kl", "lk", "lk_log", "tv"])
def test_every_loss_falls(tmp_path: Path, hybrid: Path, loss: str) -> None:
    made = runs.config(tmp_path, hybrid, loss=loss, steps=30, schedule="constant", seed=1)
    facts = runs.trainer(made).run()
    found = runs.losses(made)
    assert len(found) == 30
    assert sum(found[-5:]) < 0.9 * sum(found[:5])
    assert facts["loss"] == found[-1]


def test_muon_turns_matrices_by_orthogonal_updates_of_the_size_of_adamw(tmp_path: Path, hybrid: Path) -> None:
    """A matrix's first update is U V^T of its gradient's singular vectors, as far as five Newton-Schulz iterations in
    bfloat16 come to it, times 0.2 sqrt(larger side); a vector's is AdamW's, its gradient's sign."""
    made = runs.trainer(runs.config(tmp_path, hybrid, optimizer="muon", warmup=0, schedule="constant", lr=0.01))
    before = {n: p.detach().clone() for n, p in made.begun.unroll.named_parameters()}
    kept: dict[str, torch.Tensor] = {}
    names = list(made.begun.unroll.named_parameters())
    made.step.optimisers[0].register_step_pre_hook(lambda *_: kept.update({n: p.grad.clone() for n, p in names}))
    made.step([made.source.take()])
    kinds = set()
    for name, parameter in names:
        change, gradient = (before[name] - parameter.detach()) / 0.01, kept[name]
        kinds.add(change.dim())
        if change.dim() == 2:
            u, s, v = torch.linalg.svd(gradient.double(), full_matrices=False)
            change = u.T @ (change.double() / (0.2 * max(change.shape) ** 0.5)) @ v.T
            large = s > 0.05 * s.norm()  # smaller ones are still on their way up after five iterations
            assert large.any()
            assert ((change.diag()[large] > 0.6) & (change.diag()[large] < 1.3)).all()
            assert float((change - change.diag().diag()).abs().max()) < 0.1
        elif change.dim() == 1:
            assert torch.allclose(change, gradient.sign(), atol=1e-2)
    assert kinds == {1, 2}


def test_steps_follow_the_gradient_of_the_mean_over_all_rows(tmp_path: Path, hybrid: Path) -> None:
    """Two packed batches in one step give the gradient of their joint mean, computed here on whole logits."""
    made = runs.trainer(runs.config(tmp_path, hybrid, accumulation=2, target_dtype="float64", loss_weights=[0.7, 0.3]))
    model, unroll = made.begun.model, made.begun.unroll
    assert isinstance(model, Decoder)
    items = [made.source.take() for _ in range(2)]
    logs: list[list[torch.Tensor]] = [[], []]
    for batch, _ in items:
        layout = step_module.Layout(batch.documents)
        states = step_module.target_states(model, batch, layout)
        valid = step_module.valid_rows(batch, layout, 2)
        outputs = made.step.outputs(batch, states, layout, 2)
        for k, (out, rows) in enumerate(zip(outputs, valid, strict=True), 1):
            at = torch.nonzero(rows[0])[:, 0]
            q = model.logits(out[0, at]).log_softmax(-1)
            p = model.logits(states.teacher[0, at + k]).softmax(-1)
            logs[k - 1].append((p * (p.log() - q)).sum(-1))
    total = 0.7 * torch.cat(logs[0]).mean() + 0.3 * torch.cat(logs[1]).mean()
    expected = torch.autograd.grad(total, list(unroll.parameters()))
    kept: list[torch.Tensor] = []
    made.step.optimisers[0].register_step_pre_hook(lambda *_: kept.extend(p.grad.clone() for p in unroll.parameters()))
    result = made.step(items)
    assert result.loss == pytest.approx(float(total.detach()), rel=1e-9)
    scale = min(1.0, 1.0 / result.gradient)
    for mine, theirs in zip(kept, expected, strict=True):
        assert torch.allclose(mine, theirs * scale, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_the_target_runs_once_a_batch(tmp_path: Path, hybrid: Path, loss: str) -> None:
    """All draft steps are taught from the hidden states of one pass, which builds no graph."""
    made = runs.trainer(runs.config(tmp_path, hybrid, accumulation=3, loss=loss, unroll=3))
    model = made.begun.model
    assert isinstance(model, Decoder)
    passes: list[bool] = []
    model.layers[0].register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    made.step([made.source.take() for _ in range(3)])
    assert passes == [False] * 3


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_nested", "qwen3_next", "qwen3_5_moe", "qwen2"])
def test_the_output_is_a_head(tmp_path: Path, kind: str) -> None:
    """It loads over its target, merged it loads alone, and both are the trained weights."""
    model = runs.target(tmp_path / "model", kind)
    made = runs.trainer(runs.config(tmp_path, model, merge=str(tmp_path / "merged")))
    made.run()
    trained = dict(made.begun.unroll.mtp.named_parameters())
    base, output = open_checkpoint(model), open_checkpoint(tmp_path / "head")
    assert set(output.tensors) == set(head_of(model))
    external, _ = load_decoder(base, dtype=torch.float32, device=CPU, head=output)
    merged, _ = load_decoder(open_checkpoint(tmp_path / "merged"), dtype=torch.float32, device=CPU)
    for loaded in (external, merged):
        assert loaded.mtp is not None
        for name, parameter in loaded.mtp.named_parameters():
            assert torch.equal(parameter, trained[name])
    before = load_decoder(base, dtype=torch.float32, device=CPU)[0]
    for name, parameter in merged.named_parameters():
        if not name.startswith("mtp."):
            assert torch.equal(parameter, before.get_parameter(name))


def test_from_scratch_and_from_a_path(tmp_path: Path, bare: Path) -> None:
    made = runs.config(tmp_path, bare, init="scratch", merge=str(tmp_path / "merged"))
    runs.trainer(made).run()
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 1
    again = runs.trainer(runs.config(tmp_path, bare, init=str(tmp_path / "head"), output=str(tmp_path / "second")))
    stored = head_of(tmp_path / "head")
    assert torch.equal(again.begun.initial["mtp.fusions.0.fuse.weight"], stored["mtp.fc.weight"])
    assert load_decoder(open_checkpoint(tmp_path / "merged"), dtype=torch.float32, device=CPU)[0].mtp is not None


def test_scratch_is_the_same_for_a_seed(tmp_path: Path, bare: Path) -> None:
    first, second = (runs.trainer(runs.config(tmp_path, bare, init="scratch", seed=s)).begun.initial for s in (3, 3))
    other = runs.trainer(runs.config(tmp_path, bare, init="scratch", seed=4)).begun.initial
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert not torch.equal(first["mtp.fusions.0.fuse.weight"], other["mtp.fusions.0.fuse.weight"])


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_scratch_starts_less_certain_than_its_target(tmp_path: Path, kind: str) -> None:
    """What the end norm multiplies with is a quarter of the target's, for plain and for one-plus norms."""
    begun = start(runs.config(tmp_path, runs.target(tmp_path / "model", kind), init="scratch"), ALONE)
    assert isinstance(begun.model, Decoder)
    norm = begun.unroll.mtp.out_norms[0]
    assert isinstance(norm, RMSNorm)
    assert torch.allclose(norm.scale, begun.model.norm.scale / 4)
    assert begun.model.norm.scale.std() > 0.01


def test_a_head_in_float32_keeps_its_precision_beside_a_bfloat16_target(tmp_path: Path, hybrid: Path) -> None:
    begun = start(runs.config(tmp_path, hybrid, target_dtype="bfloat16"), ALONE)
    assert begun.model.embed.weight.dtype == torch.bfloat16
    assert torch.equal(begun.initial["mtp.fusions.0.fuse.weight"], head_of(hybrid)["mtp.fc.weight"])


def test_the_head_accepted_best_is_kept(tmp_path: Path, hybrid: Path) -> None:
    """The exported head is the one of the best evaluation, not the last; here a huge rate ruins the later ones."""
    runs.data(tmp_path / "eval.jsonl", lines=12, seed=5, repeat=True)
    made = runs.trainer(
        runs.config(
            tmp_path, hybrid, eval=str(tmp_path / "eval.jsonl"), eval_every=2, eval_draft_tokens=2, steps=8, lr=0.3
        )
    )
    facts = made.run()
    lines = map(json.loads, (tmp_path / "head" / "logs" / "log.jsonl").read_text().splitlines())
    by_step = {r["step"]: r["eval"]["accept_length"] for r in lines if "eval" in r}
    assert list(by_step) == [0, 2, 4, 6, 8]
    best = max((s for s in by_step if s), key=lambda s: by_step[s])
    assert facts["best_step"] == best
    assert facts["after"]["accept_length"] == by_step[best]
    assert facts["before"]["accept_length"] == by_step[0]
    folders = sorted(p.name for p in (tmp_path / "head" / "checkpoints").iterdir())
    assert f"best-{best}" in folders
    again = runs.trainer(
        runs.config(tmp_path, hybrid, init=str(tmp_path / "head"), output=str(tmp_path / "x"), eval=None)
    )
    kept = made.begun.unroll.state_dict()
    assert all(torch.equal(kept[n], v) for n, v in again.begun.initial.items())


def test_draft_vocabulary(tmp_path: Path, hybrid: Path) -> None:
    """The most frequent predicted ids, written beside the head and taken from there by another run."""
    (tmp_path / "data.jsonl").write_text(
        "".join(
            json.dumps({"input_ids": [1, 5, 5, 7, 5, 7, 9], "loss_mask": [1, 1, 1, 1, 1, 1, 0]}) + "\n" for _ in "ab"
        )
    )
    facts = runs.trainer(runs.config(tmp_path, hybrid, draft_vocab=3)).run()
    listed = json.loads((tmp_path / "head" / "draft_vocab.json").read_text())
    assert listed == {"ids": [1, 5, 7]}
    assert facts["loss"] > 0
    file = str(tmp_path / "head" / "draft_vocab.json")
    again = runs.trainer(runs.config(tmp_path, hybrid, draft_vocab=file, output=str(tmp_path / "other")))
    assert again.vocab is not None
    assert again.vocab.tolist() == [1, 5, 7]
    with pytest.raises(NextnError, match="97 ids"):
        runs.trainer(runs.config(tmp_path, hybrid, draft_vocab=98))


# -- refusals -------------------------------------------------------------------------------------


def refused(match: str, **changes: Any) -> None:
    with pytest.raises(NextnError, match=match):
        runs.trainer(runs.config(**changes)).run()


def test_refuses_native_without_a_head(tmp_path: Path, bare: Path) -> None:
    refused("no MTP head, so there is none to start from", root=tmp_path, model=bare)


def test_refuses_a_start_without_a_head(tmp_path: Path, hybrid: Path, bare: Path) -> None:
    refused("has no MTP head", root=tmp_path, model=hybrid, init=str(bare))
    refused("not the folder of a checkpoint", root=tmp_path, model=hybrid, init="no_such_word")
    other = runs.target(tmp_path / "wide", "qwen3_5", hidden_size=64)
    refused("mtp", root=tmp_path, model=hybrid, init=str(other))


def test_refuses_a_head_that_did_not_change(tmp_path: Path) -> None:
    """A rate too small for bfloat16: each weight is stored as it was."""
    model = runs.target(tmp_path / "model", "qwen3_5")
    state = {k: v.bfloat16() for k, v in load_file(model / "model.safetensors").items()}
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NextnError, match="byte for byte") as error:
        runs.trainer(runs.config(tmp_path, model, lr=1e-12, steps=1)).run()
    assert error.value.exit_code == 1
    assert not (tmp_path / "head" / "model.safetensors").exists()


def test_refuses_a_loss_without_the_head(tmp_path: Path, hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def detached(outputs: list[torch.Tensor], *args: Any, **options: Any) -> Any:
        return chain_loss([o.detach() for o in outputs], *args, **options)

    monkeypatch.setattr(step_module, "chain_loss", detached)
    refused("does not depend on the head", root=tmp_path, model=hybrid)


def test_refuses_a_loss_without_slope(tmp_path: Path, hybrid: Path) -> None:
    """One id in the draft vocabulary: its probability is 1 whatever the head says."""
    (tmp_path / "draft_vocab.json").write_text('{"ids": [3]}')
    for given in (str(tmp_path / "draft_vocab.json"), str(tmp_path), 1):
        refused("has one id, .* does not depend on the head", root=tmp_path, model=hybrid, draft_vocab=given)
    shutil.copytree(hybrid, tmp_path / "one")
    shutil.copy(tmp_path / "draft_vocab.json", tmp_path / "one")
    refused("has one id, .* does not depend on the head", root=tmp_path, model=hybrid, init=str(tmp_path / "one"))
    refused("has one id, .* does not depend on the head", root=tmp_path, model=tmp_path / "one")
    assert not (tmp_path / "head").exists()
    runs.trainer(runs.config(tmp_path, tmp_path / "one", draft_vocab=2, steps=1)).run()


def test_refuses_a_target_that_would_change(tmp_path: Path, hybrid: Path) -> None:
    begun = start(runs.config(tmp_path, hybrid), ALONE)
    begun.model.embed.weight.requires_grad_(True)
    with pytest.raises(NextnError, match=r"embed\.weight is not frozen"):
        require_frozen(begun.model, begun.unroll)
    begun.model.embed.weight.requires_grad_(False)
    begun.unroll.mtp.fusions[0].fuse.weight.data = begun.model.embed.weight.data[:32]  # type: ignore[union-attr]
    with pytest.raises(NextnError, match=r"embed\.weight shares its memory"):
        require_frozen(begun.model, begun.unroll)


def test_refuses_to_write_over_a_checkpoint(tmp_path: Path) -> None:
    model = runs.target(tmp_path / "model", "qwen3_5")
    before = (model / "model.safetensors").read_bytes()
    refused("not of a training run", root=tmp_path, model=model, output=str(model))
    refused("holds other files", root=tmp_path, model=model, output=str(tmp_path))
    assert (model / "model.safetensors").read_bytes() == before


def test_refuses_data_without_tokens_to_predict(tmp_path: Path, hybrid: Path) -> None:
    lines = [{"input_ids": [1, 2, 3, 4], "loss_mask": [1, 1, 0, 0]}] * 3
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused("no token to predict in", root=tmp_path, model=hybrid)


def test_refuses_ce_whose_tokens_are_outside_the_draft_vocabulary(tmp_path: Path, hybrid: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"input_ids": [1, 2, 1, 2, 1, 2]}) + "\n")
    (tmp_path / "other.json").write_text('{"ids": [50, 60]}')
    vocab = str(tmp_path / "other.json")
    refused("No step had a token", root=tmp_path, model=hybrid, loss="ce", draft_vocab=vocab, steps=1)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["data=a", "stepps=3"], "Did you mean `steps`"),
        (["data=a", "steps=many"], "steps is 'many'"),
        (["data=a", "steps=true"], "steps is .true.. Give a whole number"),
        (["data=a", "loss=kld"], "Did you mean kl"),
        (["data=a", "unroll=9"], "unroll is '9'"),
        (["data=a", "loss_weights=[1]", "unroll=2"], "1 numbers for unroll = 2"),
        (["data=a", "max_length=2048", "batch_tokens=1024"], "exceeds batch_tokens"),
        (["data=a", "lr=0"], "lr is '0'"),
        (["data=a", "lr=.nan"], "lr is 'nan'"),
        (["data=a", "steps"], "no key=value"),
        (["data=a", f"seed={2**63}"], "seed is"),
        (["data=a", "steps=2026-13-45"], "steps is '2026-13-45'"),
        ([], "No training data"),
    ],
)
def test_refuses_settings(words: list[str], match: str) -> None:
    with pytest.raises(NextnError, match=match):
        load_config(None, words)


def test_words_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "data: [x.jsonl, y.jsonl]\nlr: 1e-3\nsteps: 5\nloss_weights: [1, 0.5]\nunroll: 2\n"
    )
    made = load_config(tmp_path / "a.yaml", ["steps=7", "lr=2e-4", "eval=z.jsonl"])
    assert (made.data, made.steps, made.lr, made.eval) == (["x.jsonl", "y.jsonl"], 7, 2e-4, "z.jsonl")
    assert made.step_weights == pytest.approx([2 / 3, 1 / 3])
    (tmp_path / "a.yaml").write_text("data: [x\n")
    with pytest.raises(NextnError, match="not valid YAML"):
        load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize("key", ["output", "model", "merge", "eval"])
@pytest.mark.parametrize("name", ["2026-11-29", "2026-13-45", "7", "1e3", "off", "[a"])
def test_a_name_that_yaml_would_read_as_something_else_stays_a_name(key: str, name: str) -> None:
    assert getattr(load_config(None, ["data=a", f"{key}={name}"]), key) == name
    assert load_config(None, ["data=a", "eval=null"]).eval is None


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("steps: 3\ndata: a\nsteps: 4\n")
    with pytest.raises(NextnError, match=r"'steps' twice \(lines 1 and 3\)"):
        load_config(tmp_path / "a.yaml")


def test_a_file_with_a_byte_order_mark_or_an_impossible_date(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfdata: a\n")
    assert load_config(tmp_path / "a.yaml").data == ["a"]
    (tmp_path / "a.yaml").write_text("data: a\nsteps: 2026-13-45\n")
    with pytest.raises(NextnError, match="not valid YAML"):
        load_config(tmp_path / "a.yaml")
