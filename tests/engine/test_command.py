"""`nextn generate` as a user meets it: output, options that shape logits, stops, and clear refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nextn import generate, load, stream
from nextn.assets import embedded_model
from nextn.cli import main
from nextn.errors import NextnError
from tests.oracle.checkpoints import make_checkpoint

IDS = "3,1,4,1,5"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("made") / "qwen3_5", "qwen3_5"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["generate", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def test_json(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    result = answer(capsys, checkpoint, "--prompt-ids", IDS, "--max-tokens", "9", "-k", "2")
    assert result["text"] is None
    assert len(result["tokens"]) == 9
    assert result["prompt_tokens"] == 5
    assert result["drafted"] == 2 * result["rounds"]
    assert result["accept_length"] == 1 + result["accepted"] / result["rounds"]
    assert len(result["acceptance"]) == 2
    assert result["finish_reason"] == "length"
    assert result["tokens_per_second"] == pytest.approx(9 / result["seconds"])


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--repetition-penalty", "1.6"],
        ["--presence-penalty", "1.5", "--frequency-penalty", "0.7"],
        ["--logit-bias", "83=4", "--logit-bias", "7=-100"],
        ["--min-tokens", "12", "--stop-token-id", "56"],
        ["--stop-token-id", "17", "--stop-token-id", "20"],
    ],
    ids=lambda o: "-".join(o)[:30] or "plain",
)
def test_what_shapes_logits_acts_inside_verify(
    capsys: pytest.CaptureFixture[str], checkpoint: str, options: list[str]
) -> None:
    common = [checkpoint, "--prompt-ids", "1,2,3", "--max-tokens", "24", "--dtype", "float64", *options]
    off = answer(capsys, *common, "--no-mtp")
    for k in ("1", "4"):
        on = answer(capsys, *common, "-k", k)
        assert (on["tokens"], on["finish_reason"]) == (off["tokens"], off["finish_reason"])
    assert (off["rounds"], off["accept_length"], off["acceptance"]) == (0, None, [])


def test_options_change_the_tokens(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    """The options above are not without effect on this model."""
    base = [checkpoint, "--prompt-ids", "1,2,3", "--max-tokens", "24"]
    plain = answer(capsys, *base)["tokens"]
    repeated = next(t for t in plain if plain.count(t) > 1)
    assert answer(capsys, *base, "--frequency-penalty", "2")["tokens"] != plain
    assert repeated not in answer(capsys, *base, "--logit-bias", f"{repeated}=-100")["tokens"]
    assert answer(capsys, *base, "--stop-token-id", str(plain[5]))["tokens"] == plain[: plain.index(plain[5]) + 1]


def test_logprobs(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    on = answer(capsys, checkpoint, "--prompt-ids", IDS, "--max-tokens", "6", "--logprobs", "2")
    off = answer(capsys, checkpoint, "--prompt-ids", IDS, "--max-tokens", "6", "--logprobs", "2", "--no-mtp")
    assert [p["token"] for p in on["logprobs"]] == on["tokens"]
    for a, b in zip(on["logprobs"], off["logprobs"], strict=True):
        assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-4)
        assert a["top"][0]["token"] == a["token"]
        assert a["top"][0]["logprob"] >= a["top"][1]["logprob"]


def test_separate_draft(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    native = answer(capsys, checkpoint, "--prompt-ids", IDS, "--max-tokens", "12")
    separate = answer(capsys, checkpoint, "--prompt-ids", IDS, "--max-tokens", "12", "--separate-draft")
    for key in ("tokens", "rounds", "accepted"):
        assert native[key] == separate[key]
    shared = 2 * 97 * 32 * 4
    assert separate["memory"]["weight_bytes"] == native["memory"]["weight_bytes"] + shared
    assert separate["memory"]["native_weight_bytes"] == native["memory"]["weight_bytes"]


def unmarked(shown: str) -> str:
    """What --show-drafts printed, without rejected tokens and marks."""
    return re.sub(r"\{\+(.*?)\+\}", r"\1", re.sub(r"\[-.*?-\]", "", shown, flags=re.DOTALL), flags=re.DOTALL)


def test_streamed_text_and_chat(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--prompt", "class Queue:\n", "--max-tokens", "24"]
    text = answer(capsys, *common)["text"]
    code, out, err = run(capsys, *common)
    assert (code, out) == (0, text + "\n")
    assert re.search(r"24 tokens in .* accept length", err)
    _, shown, _ = run(capsys, *common, "--show-drafts")
    assert unmarked(shown) == text + "\n"
    assert "{+" in shown
    assert answer(capsys, *common, "--chat")["prompt_tokens"] > answer(capsys, *common)["prompt_tokens"]


def test_stop_string_cuts_where_plain_decoding_does(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--prompt", "def main():\n", "--max-tokens", "40"]
    text = answer(capsys, *common)["text"]
    stop = text[17:20]
    results = [answer(capsys, *common, "--stop", stop, *extra) for extra in (["--no-mtp"], ["-k", "1"], ["-k", "5"])]
    for result in results:
        assert result["text"] == text[: text.index(stop)]
        assert result["finish_reason"] == "stop"
        assert result["tokens"] == results[0]["tokens"]
    _, shown, _ = run(capsys, *common, "--stop", stop, "--show-drafts")
    assert unmarked(shown) == results[0]["text"] + "\n"


def test_colours_only_where_they_show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["--prompt", "class Queue:", "--max-tokens", "24", "--show-drafts"]
    _, marked, _ = run(capsys, *common)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    _, styled, _ = run(capsys, *common)
    assert "{+" not in styled
    assert "\x1b[32m" in styled
    plain = re.sub(r"\x1b\[9;31m.*?\x1b\[0m", "", styled, flags=re.DOTALL)
    assert re.sub(r"\x1b\[[\d;]*m", "", plain) == unmarked(marked)
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(capsys, *common)[1] == marked


def test_prompt_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("import os\n")
    from_file = answer(capsys, "--prompt-file", str(tmp_path / "p.txt"), "--max-tokens", "4")
    assert from_file["tokens"] == answer(capsys, "--prompt", "import os\n", "--max-tokens", "4")["tokens"]


def test_sampling_defaults_come_from_the_checkpoint(
    capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path
) -> None:
    made = Path(make_checkpoint(tmp_path / "c", "qwen3_5"))
    tokens = answer(capsys, str(made), "--prompt-ids", IDS, "--max-tokens", "8")["tokens"]
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [90, tokens[3]], "do_sample": False}))
    cut = answer(capsys, str(made), "--prompt-ids", IDS, "--max-tokens", "8")
    assert (cut["tokens"], cut["finish_reason"]) == (tokens[: tokens.index(tokens[3]) + 1], "stop")
    assert answer(capsys, str(made), "--prompt-ids", IDS, "--max-tokens", "8", "--ignore-eos")["tokens"] == tokens
    (made / "generation_config.json").write_text(json.dumps({"temperature": "hot"}))
    code, _, err = run(capsys, str(made), "--prompt-ids", IDS)
    assert (code, "generation_config.json, temperature is hot" in err) == (2, True)
    (made / "generation_config.json").write_text(json.dumps({"temperature": 5.0, "top_k": 90.0, "max_new_tokens": 6}))
    drawn = [answer(capsys, str(made), "--prompt-ids", IDS, "--seed", str(s))["tokens"] for s in range(3)]
    assert len({tuple(d) for d in drawn}) == 3
    assert all(len(d) == 6 for d in drawn)
    assert answer(capsys, str(made), "--prompt-ids", IDS, "--temperature", "0")["tokens"] == tokens[:6]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--max-tokens", "3"], "No prompt is given"),
        (["--prompt", "a", "--prompt-ids", "1"], "More than one prompt"),
        (["--prompt", ""], "The prompt is empty"),
        (["--prompt-ids", ""], "The prompt is empty"),
        (["--prompt-ids", "1,x"], "--prompt-ids is"),
        (["--prompt-ids", "1,,2"], "--prompt-ids is"),
        (["--prompt", "a", "--json", "--show-drafts"], "--show-drafts marks text"),
        (["--prompt", "a", "--draft-vocab", "1.5"], "neither a count nor a file"),
        (["--prompt", "a", "--device", ""], "There is no device ''"),
        (["--prompt-ids", "4096"], "not in the vocabulary"),
        (["--prompt-ids", "-1"], "not in the vocabulary"),
        (["--prompt", "a", "-k", "0"], "--draft-tokens is 0"),
        (["--prompt", "a", "-k", "9"], "--draft-tokens is 9"),
        (["--prompt", "a", "--temperature", "-1"], "temperature is -1"),
        (["--prompt", "a", "--top-p", "1.5"], "top_p is 1.5"),
        (["--prompt", "a", "--logit-bias", "x=1"], "--logit-bias is"),
        (["--prompt", "a", "--logit-bias", "99999=1"], "logit_bias names id 99999"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens is 0"),
        (["--prompt", "a", "--dtype", "int8"], "'int8' is not a dtype"),
        (["--prompt", "a", "--device", "tpu"], "There is no device tpu"),
        (["--prompt", "a", "--no-mtp", "--separate-draft"], "contradicts"),
        (["--prompt", "a", "--no-mtp", "-k", "3"], "contradicts"),
        (["--prompt", "a", "--system", "b"], "no effect without --chat"),
        (["--prompt", "a", "--logprobs", "2"], "no effect without --json"),
        (["--prompt", "a", "--stop-token-id", "99999"], "Stop token id 99999"),
        (["--prompt", "a", "--bogus"], "No such option"),
        (["--prompt", "a", "--draft-vocab", "-5"], "--draft-vocab is '-5'"),
        (["--prompt", "a", "--draft-vocab", ""], "--draft-vocab is ''"),
        (["--prompt", "a", "--draft-vocab", "9" * 5000], "--draft-vocab is '999"),
        (["--prompt", "a", "--device", "meta"], "There is no device meta"),
        (["--prompt", "a", "--exact", "--dtype", "float32"], "Exact decoding needs the fused kernels"),
        (["--prompt", "a", "-k", "auto", "--seed", "1", "--temperature", "1"], "which follows the clock"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["nowhere", "--prompt", "a"], "nowhere is not the folder"),
        (["./nowhere", "--prompt", "a"], "nowhere is not the folder"),
        (["--prompt-ids", ",".join(["5"] * 3000)], "the model's context is"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], what: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert what in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 2


def test_bad_checkpoints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    headless = make_checkpoint(tmp_path / "headless", "qwen3_5", head=False)
    code, _, err = run(capsys, str(headless), "--prompt-ids", IDS)
    assert (code, "--no-mtp" in err) == (2, True)
    assert len(answer(capsys, str(headless), "--prompt-ids", IDS, "--no-mtp", "--max-tokens", "3")["tokens"]) == 3
    damaged = make_checkpoint(tmp_path / "damaged", "qwen3_5")
    state = load_file(damaged / "model.safetensors")
    state["mtp.fc.weight"][0, 0] = torch.nan
    save_file(state, damaged / "model.safetensors")
    code, _, err = run(capsys, str(damaged), "--prompt-ids", IDS)
    assert (code, "mtp.fc.weight" in err) == (2, True)
    (damaged / "config.json").write_text("[1, 2")
    assert run(capsys, str(damaged), "--prompt-ids", IDS)[0] == 2


def test_python_api() -> None:
    model = load()
    one = generate(model, "import os\n", max_tokens=12)
    several = generate(model, ["import os\n", [5, 6, 7], "x = "], max_tokens=12, draft_tokens=2)
    assert one.text is not None
    assert several[0].tokens == one.tokens
    steps = list(stream(model, "import os\n", max_tokens=12))
    assert "".join(step.text for step in steps) == one.text
    assert [t for step in steps for t in step.tokens] == one.tokens
    assert steps[0].round is None
    assert generate(model, []) == []
    ids = generate(model, [5, 6, 7], max_tokens=4).tokens
    for form in (torch.tensor([5, 6, 7]), np.array([5, 6, 7]), (5, 6, 7), list(np.array([5, 6, 7]))):
        assert generate(model, form, max_tokens=4).tokens == ids
    assert [g.tokens for g in generate(model, [torch.tensor([5, 6, 7]), np.array([5, 6, 7])], max_tokens=4)] == [
        ids
    ] * 2
    assert load(embedded_model(), mtp=False).has_head is False


@pytest.mark.parametrize(
    ("prompts", "options", "what"),
    [
        ("a", {"max_length": 3}, "no option 'max_length'"),
        ("a", {"draft_tokens": 2.0}, "draft_tokens is 2.0"),
        ("a", {"draft_tokens": True}, "draft_tokens is True"),
        ("a", {"draft_tokens": 9}, "draft_tokens is 9"),
        ("a", {"logit_bias": [(5, 1.0)]}, "logit_bias is no mapping"),
        ("a", {"temperature": "hot"}, "temperature is hot"),
        ("a", {"draft_vocab": 3.5}, "draft_vocab is 3.5"),
        ("a", {"draft_vocab": True}, "draft_vocab is True"),
        ("a", {"draft_vocab": ["a"]}, "something else than whole numbers"),
        ("a", {"draft_vocab": b"a"}, "draft_vocab is b'a'"),
        ("a", {"max_tokens": "5"}, "max_tokens is 5"),
        ("a", {"min_tokens": "5"}, "min_tokens is 5"),
        ("a", {"exact": "yes"}, "exact is 'yes'"),
        ("a", {"progress": 3}, "progress is of type int"),
        ("a", {"chunk": "a"}, "chunk is a"),
        ("a", {"chunk": 1.5}, "chunk is 1.5"),
        ("a", {"stop": 5}, "stop is 5"),
        ("a", {"stop_token_ids": 5}, "stop_token_ids is 5"),
        ("a", {"stop_token_ids": [99999]}, "Stop token id 99999"),
        ("a", {"ignore_eos": "no"}, "ignore_eos is 'no'"),
        (None, {}, "of type NoneType"),
        (b"abc", {}, "of type bytes"),
        ([5.5, 6], {}, "neither text nor token ids"),
        ([True], {}, "neither text nor token ids"),
        ([[5], None], {}, "neither text nor token ids"),
        ([[]], {}, "prompt is empty"),
    ],
)
def test_python_api_refusals(prompts: Any, options: dict[str, Any], what: str) -> None:
    with pytest.raises(NextnError, match=re.escape(what)):
        generate(load(), prompts, **options)
    if isinstance(prompts, str):
        with pytest.raises(NextnError, match=re.escape(what)):
            stream(load(), prompts, **options)


def test_python_load_refusals() -> None:
    with pytest.raises(NextnError, match=r"torch\.int8 is not a dtype"):
        load(dtype=torch.int8)
    with pytest.raises(NextnError, match="given a int"):
        load(5)  # type: ignore[arg-type]
    with pytest.raises(NextnError, match="given a int as its head"):
        load(head=5)  # type: ignore[arg-type]
    with pytest.raises(NextnError, match="given a int as its cache_dir"):
        load(cache_dir=5)  # type: ignore[arg-type]
    with pytest.raises(NextnError, match="mtp is 'no'"):
        load(mtp="no")  # type: ignore[arg-type]
    with pytest.raises(NextnError, match="progress is of type int"):
        load(progress=5)  # type: ignore[arg-type]
    with pytest.raises(NextnError, match="mtp=False"):
        load(mtp=False, separate_draft=True)
    with pytest.raises(NextnError, match="on_step is of type int"):
        generate(load(), "a", on_step=3)  # type: ignore[call-overload]
    with pytest.raises(NextnError, match="follows the clock"):
        generate(load(), "a", draft_tokens="auto", seed=1, temperature=1.0)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}, {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.8},
     {"temperature": 1.2, "seed": 3, "min_p": 0.1, "repetition_penalty": 1.2}, {"draft_tokens": 0, "logprobs": 2}],
)  # fmt: skip
def test_a_prompt_that_breaks_leaves_the_others_alone(options: dict[str, Any]) -> None:
    """An embedding of NaN: of several prompts the one that meets it ends in error, a single one is refused."""
    model = load()
    prompts = [[5, 6, 7], [5, 4000, 7], [9, 10]]
    options = {"max_tokens": 12, **options}
    expected = [generate(model, p, **options) for p in prompts]
    assert not any(4000 in g.tokens for g in expected)
    # The output projection is the same tensor: its row of NaN would break every logit.
    plain = model.target.embed.forward
    model.target.embed.forward = lambda ids: plain(ids).masked_fill((ids == 4000)[..., None], torch.nan)  # type: ignore[method-assign]
    found = generate(model, prompts, **options)
    assert [g.finish_reason for g in found] == ["length", "error", "length"]
    assert (found[0].tokens, found[2].tokens) == (expected[0].tokens, expected[2].tokens)
    assert found[1].tokens == []
    assert found[1].as_json()["error"] == found[1].error
    assert found[1].error is not None
    assert found[1].error.startswith("The model's logits hold NaN or are infinite. Decode in another dtype")
    assert (found[0].error, "error" in found[0].as_json()) == (None, False)
    with pytest.raises(NextnError, match="NaN"):
        generate(model, prompts[1], **options)


def test_automatic_draft_length_changes_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "def main():", "--max-tokens", "60", "--temperature", "0", "--dtype", "float64"]
    plain = answer(capsys, *options, "--no-mtp")
    auto = answer(capsys, *options, "--draft-tokens", "auto")
    assert auto["tokens"] == plain["tokens"]
    assert auto["drafted"] > 0
    assert auto["accept_length"] == 1 + auto["accepted"] / auto["rounds"]


@pytest.mark.parametrize("length", ["0", "9", "12", "", "automatic", "-1", "1.5"])
def test_draft_lengths_that_do_not_exist(capsys: pytest.CaptureFixture[str], checkpoint: str, length: str) -> None:
    code, _, err = run(capsys, checkpoint, "--prompt-ids", IDS, f"--draft-tokens={length}")
    assert code == 2
    assert "--draft-tokens" in err
    assert "auto" in err
