"""Acceptance on text: equal to chains drafted one by one, and to the engine's own rounds on the target's own text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

import pytest
import torch
from torch import Tensor

from nextn.api import generate, load
from nextn.assets import embedded_model
from nextn.cli import main
from nextn.engine.draft_vocab import TOKEN_ORDER, frequent_ids
from nextn.engine.engine import Engine
from nextn.engine.params import SamplingParams
from nextn.engine.request import Request, Running
from nextn.errors import NextnError
from nextn.models.context import SequenceContext
from nextn.models.decoder import Decoder
from nextn.train import progress
from nextn.train.acceptance import Acceptance
from nextn.train.evaluate import evaluate
from nextn.train.packing import Document, pack
from nextn.train.progress import Progress
from tests.engine.models import decode, decoder
from tests.oracle.checkpoints import make_checkpoint

FEW = 3
"""Ids of a vocabulary so small that a random head is often right."""


def target_logits(model: Decoder, ids: list[int]) -> Tensor:
    hidden, _ = model(torch.tensor([ids]), SequenceContext(torch.arange(len(ids))[None]))
    return model.logits(hidden[0])


def given_hidden(model: Decoder, ids: list[int]) -> Tensor:
    """What the target hands the head at each position, [1, tokens, hidden]."""
    return model.head_hidden(*model(torch.tensor([ids]), SequenceContext(torch.arange(len(ids))[None])))


def chain_logits(model: Decoder, ids: list[int], given: Tensor, chain: int, steps: int) -> list[Tensor]:
    """The head's logits of steps 1..K after position `chain`, fed the text's own tokens: whole-sequence forwards."""
    tokens = torch.tensor([ids])
    hidden = given[:, : chain + 1]
    out = []
    for k in range(1, steps + 1):
        rows = SequenceContext(torch.arange(chain + k)[None])
        outputs, recycled = model.head_forward(tokens[:, 1 : chain + k + 1], hidden, rows)
        out.append(model.logits(outputs[0, -1]))
        hidden = torch.cat((hidden, recycled[:, -1:]), 1)
    return out


def documents(seed: int) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, FEW, (n,), generator=generator).tolist() for n in (23, 14, 30, 4)]
    answer = [False] * 6 + [True] * 9 + [False] * 5 + [True] * 10
    masks = [[True] * 23, [False] * 5 + [True] * 9, answer, [True] * 4]
    return [Document(i, m, d) for i, m, d in zip(ids, masks, ("code", "chat", "chat", ""), strict=True)]


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3"])
@torch.no_grad()
def test_measures_equal_chains_drafted_one_by_one(kind: str) -> None:
    model, steps, heat = decoder(kind, vocab=FEW, seed=1), 3, 0.7
    rounds: list[tuple[int, str, list[bool], list[float]]] = []
    own = []
    for d in documents(0):
        ids = list(d.ids)
        target, given = target_logits(model, ids), given_hidden(model, ids)
        own += [int(target[i - 1].argmax()) == ids[i] for i in range(1, len(ids)) if d.loss_mask[i]]
        for chain in range(len(ids) - steps - 1):
            if not all(d.loss_mask[chain + 1 : chain + steps + 2]):
                continue
            matches, shares = [], []
            for k, drafted in enumerate(chain_logits(model, ids, given, chain, steps)):
                wanted = target[chain + k + 1]
                matches.append(int(drafted.argmax()) == int(wanted.argmax()))
                p, q = (wanted / heat).softmax(-1), (drafted / heat).softmax(-1)
                shares.append(1 - float((p - q).abs().sum()) / 2)
            rounds.append((chain + 2, d.domain, matches, shares))

    def acceptance(select: list[tuple[int, str, list[bool], list[float]]]) -> list[float]:
        return [sum(all(m[: i + 1]) for _, _, m, _ in select) / len(select) for i in range(steps)]

    data = [pack(documents(0)[:3], 80), pack(documents(0)[3:])]
    found = evaluate(model, data, draft_tokens=steps, temperature=heat, edges=(8, 16)).as_json()
    assert 0.01 < found["acceptance"][1] < found["acceptance"][0] < 0.9
    assert found["acceptance"] == pytest.approx(acceptance(rounds))
    assert found["accept_length"] == pytest.approx(1 + sum(acceptance(rounds)))
    assert found["rounds"] == len(rounds)
    assert found["own_text"] == pytest.approx(sum(own) / len(own))
    for low, high, bucket in zip((0, 9, 17), (8, 16, 99), found["buckets"], strict=True):
        select = [r for r in rounds if low <= r[0] <= high]
        assert (bucket["from"], bucket["to"]) == (low, high if high < 99 else None)
        assert (bucket["rounds"], bucket["acceptance"]) == (len(select), pytest.approx(acceptance(select)))
    assert set(found["domains"]) == {"code", "chat"}
    for name, counts in found["domains"].items():
        assert counts["acceptance"] == pytest.approx(acceptance([r for r in rounds if r[1] == name]))
    products = torch.tensor([r[3] for r in rounds], dtype=torch.float64).cumprod(1).mean(0)
    assert found["sampled"]["acceptance"] == pytest.approx(products.tolist(), rel=1e-6)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3"])
def test_walking_the_targets_own_text_gives_the_engines_rounds(kind: str) -> None:
    model, steps = decoder(kind, vocab=FEW, seed=1), 2
    prompts = [[1, 2, 0], [2], [0, 0, 1, 0, 2, 2, 1, 1]]
    sequences = decode(Engine(model, draft_tokens=steps), prompts, max_tokens=24)
    wanted = Acceptance(steps)
    for prompt, s in zip(prompts, sequences, strict=True):
        known = len(prompt) + 1
        for r in s.rounds:
            if known + steps <= len(prompt) + len(s.tokens):
                wanted.add(
                    torch.tensor([[r.accepted > i for i in range(steps)]]), torch.tensor([known]), [f"p{len(prompt)}"]
                )
            known += r.accepted + 1
    texts = [
        Document([*p, *s.tokens], [False] * len(p) + [True] * len(s.tokens), f"p{len(p)}")
        for p, s in zip(prompts, sequences, strict=True)
    ]
    found = evaluate(model, [pack(texts)], draft_tokens=steps).as_json()
    assert found["own_text"] == 1
    assert found["simulated"] == wanted.as_json()
    assert 0 < found["simulated"]["acceptance"][0] < 1


@pytest.mark.parametrize("ids", [None, [0, 2]])
def test_walking_sampled_text_gives_the_engines_rounds_on_average(ids: list[int] | None) -> None:
    """Text sampled without the head, against rounds of sampling with it: equal within four standard errors."""
    model, steps, heat, prompts = decoder("qwen3", vocab=FEW, seed=1), 2, 0.7, [[i % 3, i % 2, 1] for i in range(96)]

    def sampled(engine: Engine, seed: int) -> list[Running]:
        params = [SamplingParams(temperature=heat, max_tokens=24, seed=seed + i) for i in range(len(prompts))]
        news = engine.rounds([Request(p, how) for p, how in zip(prompts, params, strict=True)])
        found = {s.index: s for step in news for s, _ in step}
        return [found[i] for i in range(len(prompts))]

    texts = [
        Document([*p, *s.tokens], [False] * len(p) + [True] * len(s.tokens))
        for p, s in zip(prompts, sampled(Engine(model, draft_tokens=0), 1), strict=True)
    ]
    given = torch.tensor(ids) if ids else None
    found = evaluate(model, [pack(texts)], draft_tokens=steps, temperature=heat, draft_ids=given)
    wanted = Acceptance(steps)
    engine = Engine(model, draft_tokens=steps, draft_vocab=ids)
    for s in (s for seed in (1000, 2000, 3000) for s in sampled(engine, seed)):
        known = 1
        for r in s.rounds:
            if known + steps <= len(s.tokens):
                kept = torch.tensor([[r.accepted > i for i in range(steps)]])
                wanted.add(kept, torch.tensor([known]), [""])
            known += r.accepted + 1
    assert found.sampled_simulated is not None
    walked = found.sampled_simulated.total
    assert walked.rounds == pytest.approx(wanted.total.rounds / 3, rel=0.05)
    for mine, theirs in zip(walked.acceptance, wanted.total.acceptance, strict=True):
        assert 0.05 < theirs < 0.95
        assert abs(mine - theirs) < 4 * (theirs * (1 - theirs) * (1 / wanted.total.rounds + 1 / walked.rounds)) ** 0.5


@torch.no_grad()
def test_a_reduced_vocabulary_drafts_only_its_ids() -> None:
    model, ids = decoder("qwen3", vocab=FEW), torch.tensor([0, 2])
    [document] = documents(0)[:1]
    text = list(document.ids)
    target, given = target_logits(model, text), given_hidden(model, text)
    kept, shares = [], []
    for chain in range(len(text) - 2):
        [drafted] = chain_logits(model, text, given, chain, 1)
        kept.append(int(ids[drafted[ids].argmax()]) == int(target[chain + 1].argmax()))
        q = torch.zeros(FEW, dtype=torch.float64)
        q[ids] = drafted[ids].softmax(-1)
        shares.append(float(torch.minimum(q, target[chain + 1].softmax(-1)).sum()))
    found = evaluate(model, [pack([document])], draft_tokens=1, temperature=1.0, draft_ids=ids)
    assert found.accept_length == pytest.approx(1 + sum(kept) / len(kept))
    assert found.sampled is not None
    assert found.sampled.total.acceptance == pytest.approx([sum(shares) / len(shares)])


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("qwen3", vocab=FEW)
    data = [pack(documents(1))]
    whole = evaluate(model, data, draft_tokens=3, temperature=0.5).as_json()
    monkeypatch.setattr("nextn.train.evaluate.LOGITS_BYTES", 7 * 4 * FEW)
    blocks = evaluate(model, data, draft_tokens=3, temperature=0.5).as_json()
    assert blocks["sampled"].pop("accept_length") == pytest.approx(whole["sampled"].pop("accept_length"))
    assert blocks["acceptance"] == whole["acceptance"]


def test_texts_too_short_to_judge_are_an_error() -> None:
    with pytest.raises(NextnError, match="4 tokens"):
        evaluate(decoder("qwen3", vocab=FEW), [pack([Document([1] * 4, [True] * 4)])], draft_tokens=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3_5", seed=1, vocab_size=FEW)


def write_lines(path: Path) -> Path:
    lines = [
        {"input_ids": list(d.ids), "loss_mask": [int(m) for m in d.loss_mask], "domain": d.domain} for d in documents(0)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\nnonsense\n")
    return path


def run(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code


def test_the_command_prints_what_evaluate_and_the_engine_find(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, picture = write_lines(tmp_path / "d.jsonl"), tmp_path / "p.png"
    run(
        [
            *("eval", str(checkpoint), "--data", str(data), "--dtype", "float64", "-k", "2", "--temperature", "0.8"),
            *("--decode", "--decode-prompts", "9", "--max-tokens", "12", "--plot", str(picture), "--json"),
        ]
    )
    found = json.loads(capsys.readouterr().out)
    model = load(checkpoint, dtype="float64")
    wanted = evaluate(model.target, [pack(documents(0))], draft_tokens=2, temperature=0.8).as_json()
    for name in ("acceptance", "accept_length", "buckets", "domains", "tokens", "own_text"):
        assert found[name] == wanted[name]
    assert found["sampled"]["acceptance"] == pytest.approx(wanted["sampled"]["acceptance"])
    assert found["lines"]["malformed"] == {"not JSON": 1}
    rounds, accepted, tokens = 0, 0, 0
    for d in documents(0):
        start = list(d.ids[: d.loss_mask.index(True) or len(d.ids) // 4])
        result = generate(model, start, draft_tokens=2, max_tokens=12, temperature=0)
        rounds, accepted, tokens = rounds + result.rounds, accepted + result.accepted, tokens + len(result.tokens)
    assert found["decode"]["accept_length"] == pytest.approx(1 + accepted / rounds)
    assert (found["decode"]["tokens"], found["decode"]["prompts"]) == (tokens, 4)
    assert found["decode_sampled"]["temperature"] == 0.8
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("asked", [65536, 40, 1])
def test_progress_ends_where_the_text_does(
    checkpoint: Path, tmp_path: Path, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[tuple[int | None, list[int]]] = []

    class Recorded(Progress):
        def __init__(self, label: str, unit: str, total: int | None, out: TextIO) -> None:
            super().__init__(label, unit, total, out)
            bars.append((total, []))

        def at(self, done: int, note: str = "") -> None:
            bars[-1][1].append(done)

    monkeypatch.setattr(progress, "Progress", Recorded)
    data = write_lines(tmp_path / "d.jsonl")
    run(["eval", str(checkpoint), "--data", str(data), "--tokens", str(asked), "--max-length", "64",
         "--batch-tokens", "64"])  # fmt: skip
    [(total, told)] = bars
    whole = sum(len(d.ids) for d in documents(0))
    assert total == told[-1]
    assert min(asked, whole) <= total <= whole


def test_another_head_is_judged_on_the_same_target(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_checkpoint(tmp_path / "other", "qwen3_5", seed=5, vocab_size=FEW)
    data = write_lines(tmp_path / "d.jsonl")
    found = []
    for words in ([], ["--head", str(other)]):
        run(["eval", str(checkpoint), *words, "--data", str(data), "--dtype", "float64", "--json"])
        found.append(json.loads(capsys.readouterr().out))
    model = load(checkpoint, head=other, dtype="float64")
    wanted = evaluate(model.target, [pack(documents(0))], draft_tokens=3).as_json()
    assert found[1]["acceptance"] == wanted["acceptance"] != found[0]["acceptance"]
    assert found[1]["own_text"] == found[0]["own_text"]
    assert found[1]["head"] == str(other)


def test_the_table_shows_every_measure(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_lines(tmp_path / "d.jsonl")
    run(["eval", str(checkpoint), "--data", str(data), "--decode", "--max-tokens", "6", "--temperature", "1"])
    shown = capsys.readouterr()
    for words in ("teacher-forced, greedy", "by rounds", "decoded, at temperature", "domain code", "context 0-128"):
        assert words in shown.out
    assert "1 malformed lines" in shown.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No text is named"),
        (["--data", "absent.jsonl"], "no data file"),
        (["--data", "d.jsonl", "-k", "9"], "--draft-tokens is 9.\n       Give a whole number from 1 to 8."),
        (["--data", "d.jsonl", "-k", "0"], "--draft-tokens is 0.\n       Give a whole number from 1 to 8."),
        (["--data", "d.jsonl", "--temperature", "0"], "--temperature is 0"),
        (["--data", "d.jsonl", "--batch-tokens", "8"], "--batch-tokens is 8"),
        (["--data", "absent.jsonl", "--plot", "absent/a.png"], "--plot absent/a.png names no file"),
        (["--data", "absent.jsonl", "--plot", "."], "--plot . names no file"),
        (["--data", "absent.jsonl", "--plot", "a.jpg"], "--plot a.jpg does not end in .png"),
        (["--data", "absent.jsonl", "--plot", "a"], "--plot a does not end in .png"),
        (["--data", "absent.jsonl", "--seed", "-1"], "--seed is -1"),
        (["--data", "absent.jsonl", "--seed", str(2**63)], f"--seed is {2**63}"),
        (["--data", "absent.jsonl", "--draft-vocab-text", "d.jsonl"], "needs to know how many"),
        (["--data", "d.jsonl", "--draft-vocab", "absent"], "'absent', which is neither a count nor a file"),
        (["--data", "d.jsonl", "--draft-vocab", "d.jsonl"], "d.jsonl is not valid JSON"),
    ],
)
def test_bad_options_are_two_sentences(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "d.jsonl")
    with pytest.raises(SystemExit) as error:
        main(["eval", str(checkpoint), *words])
    assert error.value.code == 2
    assert said in capsys.readouterr().err


def test_frequent_ids_are_counted_in_a_text_where_the_model_names_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the refusal advises works, and drafts from the ids that the text has most."""
    folder, data, text = tmp_path / "model", tmp_path / "d.jsonl", tmp_path / "text"
    folder.mkdir()
    for file in embedded_model().iterdir():
        if file.name != TOKEN_ORDER:
            (folder / file.name).symlink_to(file)
    text.write_text("import os\n\nfor name in os.listdir():\n    print(name)\n" * 20)
    data.write_text(json.dumps({"text": text.read_text()}) + "\n")
    common = ["eval", str(folder), "--data", str(data), "--tokens", "200", "--json", "--draft-vocab"]
    with pytest.raises(SystemExit) as error:
        main([*common, "12"])
    assert error.value.code == 2
    assert f"carries no {TOKEN_ORDER}" in (said := capsys.readouterr().err)
    assert "--draft-vocab-text FILE" in said
    run([*common, "12", "--draft-vocab-text", str(text)])
    counted = json.loads(capsys.readouterr().out)
    model = load(folder)
    assert model.tokenizer is not None
    ids = frequent_ids(model.tokenizer.encode(text.read_text()), 12, always=model.defaults.eos_ids, vocab=4096)
    (tmp_path / "ids").write_text(json.dumps(ids))
    run([*common, str(tmp_path / "ids")])
    assert json.loads(capsys.readouterr().out) == counted
    assert counted["draft_vocab"] == 12
    assert counted["accept_length"] > 1


def test_a_picture_that_cannot_be_written_loses_no_figures(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the largest seed, where decoding counts seeds on."""
    data, picture = write_lines(tmp_path / "d.jsonl"), tmp_path / "p.PNG"
    picture.symlink_to("/proc/no/such/folder")
    words = ["--data", str(data), "--decode", "--max-tokens", "3", "--temperature", "1", "--seed", str(2**63 - 1)]
    with pytest.raises(SystemExit) as error:
        main(["eval", str(checkpoint), *words, "--plot", str(picture), "--json"])
    shown = capsys.readouterr()
    assert error.value.code == 2
    assert f"{picture} cannot be written" in shown.err
    assert json.loads(shown.out)["decode_sampled"]["prompts"] == 4
