"""What decode.py's record is made of, on a CPU: rows, the separate draft, the start-up, and `nextn.generate`."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nextn import api
from nextn.assets import embedded_model
from nextn.engine.defaults import GenerationDefaults
from nextn.engine.engine import Engine
from nextn.models.load import LoadReport, parameter_bytes
from tests.engine.models import decode as decode_all
from tests.engine.models import decoder
from tests.oracle.checkpoints import make_checkpoint

pytest.importorskip("triton")

from benchmarks import decode, decode_memory, product_speed, start_up
from benchmarks.decode_memory import Peak, separated
from benchmarks.geometries import GEOMETRIES


@pytest.mark.parametrize("tied", [True, False])
def test_a_separated_model_is_what_loading_a_separate_draft_gives(tmp_path: Path, tied: bool) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5", tied=tied)
    native = api.load(folder, device="cpu", dtype="float64").target
    asked = api.load(folder, device="cpu", dtype="float64", separate_draft=True)
    assert asked.draft is not None
    before = native.state_dict()

    def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
        return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items())

    with separated(native) as draft:
        assert native.mtp is None
        assert equal(native.state_dict(), asked.target.state_dict())
        assert equal(draft.state_dict(), asked.draft.state_dict())
        held = parameter_bytes([*native.parameters(), *draft.parameters()])
        assert held == parameter_bytes([*asked.target.parameters(), *asked.draft.parameters()])
    assert native.mtp is not None
    assert draft.mtp is None
    assert equal(native.state_dict(), before)


def test_a_separated_model_drafts_the_same_and_is_put_together_after_an_error() -> None:
    model = decoder("qwen3_5")
    prompts = [[5, 9, 2], [7]]
    native = [(s.tokens, s.rounds) for s in decode_all(Engine(model, draft_tokens=3), prompts)]
    head = model.mtp
    with separated(model) as draft:
        apart = [(s.tokens, s.rounds) for s in decode_all(Engine(model, draft=draft, draft_tokens=3), prompts)]
    assert apart == native

    def fail() -> None:
        with separated(model):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model.mtp is head


class Clocked:
    """A bench whose times are made up, and say what was asked."""

    def __init__(self, size: int, *, capture_only: bool = False) -> None:
        self.model, self.cache = decoder("qwen3_5"), SimpleNamespace(nbytes=1000)
        self.size, self.context, self.repeats, self.capture_only = size, 64, 7, capture_only

    def time(self, k: int, **options: Any) -> float:
        if self.capture_only:
            return 0.0
        if options.get("exact"):
            return 20.0 + k
        if "forced" in options:
            return 10.0 + options["forced"]
        if options.get("head") is False:
            return 6.0
        return 8.0 if "draft" in options else 5.0 if "vocab" in options else 10.0 if k else 4.0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let peaks be measured without a GPU; the calls are listed."""
    calls: list[str] = []
    peaks = itertools.count(1)

    def released() -> int:
        calls.append("released")
        return 10**9

    monkeypatch.setattr(decode_memory, "released", released)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks) * 10**9)
    return calls


def test_a_row_holds_its_own_measurements(memory: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "REDUCED", 16)
    monkeypatch.setattr(decode, "product_speed", lambda *_: {"generate_step_ms": 4.5})
    bench: Any = Clocked(1)
    row, reduced = decode.row_of(GEOMETRIES["4b"], bench, 3, 100.0, full=True)
    assert (row["step_ms"], row["round_ms"], reduced["round_ms"], row["separate_draft_round_ms"]) == (
        4.0,
        10.0,
        5.0,
        8.0,
    )
    assert (row["break_even_accept_length"], reduced["break_even_accept_length"]) == (2.5, 1.25)
    assert (row["head_share"], reduced["head_share"]) == (0.4, -0.2)
    assert (row["draft_vocab"], reduced["draft_vocab"]) == (None, 16)
    # In the order measured: native, reduced, separate, each after a clean start.
    assert (row["peak_memory_gb"], reduced["peak_memory_gb"], row["separate_draft_peak_memory_gb"]) == (1.0, 2.0, 3.0)
    assert row["separate_draft_extra_gb"] == 2.0
    assert memory == ["released", "reset"] * 3
    weights = parameter_bytes(bench.model.parameters())
    assert row["peak_memory_other_gb"] == round((10**9 - weights - 1000) / 1e9, 3)
    assert (row["exact_step_ms"], row["exact_round_ms"]) == (20.0, 23.0)
    assert [f["speed_up"] for f in row["forced"]] == [0.4, round(8 / 11, 3), 1.0, round(16 / 13, 3)]
    assert row["generate_step_ms"] == 4.5
    assert bench.repeats == 7
    assert decode.line(row).startswith("   4b batch  1 K 3 draft vocab None: step 4.000 ms")


def test_the_product_runs_at_every_batch_size_in_full_alone(memory: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(decode, "product_speed", lambda model, *sizes: asked.append(sizes) or {})
    monkeypatch.setattr(decode, "REDUCED", 16)
    bench: Any = Clocked(8)
    assert len(decode.row_of(GEOMETRIES["4b"], bench, 3, 100.0, full=False)) == 1
    assert asked == []
    decode.row_of(GEOMETRIES["4b"], bench, 3, 100.0, full=True)
    assert asked == [(8, bench.context, 3)]


def test_capturing_alone_times_nothing(memory: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "REDUCED", 16)
    bench: Any = Clocked(1, capture_only=True)
    row, _ = decode.row_of(GEOMETRIES["4b"], bench, 3, 1.0, full=True)
    assert row["round_ms"] == 0.0


def test_memory_beside_weights_and_cache_is_reported(memory: list[str]) -> None:
    bench: Any = Clocked(1)
    held = [torch.zeros(1000, dtype=torch.float32)]
    assert decode_memory.peak(bench, 3, held) == Peak(10.0, 1.0, (10**9 - 4000 - 1000) / 1e9)


def test_start_up_ends_with_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    rounds = Engine.rounds

    def watched(self: Engine, requests: Any, **options: Any) -> Any:
        for news in rounds(self, requests, **options):
            seen.extend((len(s.request.prompt), update.round) for s, update in news)
            yield news

    monkeypatch.setattr(Engine, "rounds", watched)
    began = time.perf_counter()
    found = start_up.seconds_to_first_round(decoder("qwen3_5"), 20)
    assert 0 < found <= time.perf_counter() - began
    assert [length for length, _ in seen] == [20, 20]
    assert [round_ is None for _, round_ in seen] == [True, False]
    assert len(seen[1][1].drafts) == start_up.DRAFT_TOKENS


def test_start_up_begins_with_empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton keeps binaries and the outcome of tuning in the folder that is made for the two runs."""
    folders: list[str] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        assert command[1].endswith("start_up.py")
        assert command[2:] == ["--geometry", "4b", "--context", "64"]
        program = "import triton; print(triton.knobs.cache.dir)"
        done = subprocess_run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        cache = Path(done.stdout.strip())
        assert cache.exists() == bool(folders)
        cache.mkdir(parents=True, exist_ok=True)
        folders.append(str(cache))
        assert (env["FLA_CACHE_RESULTS"], env["FLA_CACHE_MODE"]) == ("1", "disabled")
        assert env["PATH"] == os.environ["PATH"]
        return SimpleNamespace(stdout=f"noise\n{start_up.STARTED} {3.14159 / len(folders)}\n")

    subprocess_run = subprocess.run
    monkeypatch.setattr(start_up.subprocess, "run", run)
    found = start_up.start_ups("4b", 64)
    assert found == {"prompt_tokens": 64, "start_up_cold_s": 3.14, "start_up_warm_s": 1.57}
    assert folders[0] == folders[1]
    assert not Path(folders[0]).exists()


def test_a_tokenizer_for_more_ids_than_it_has() -> None:
    folder = embedded_model()
    plain, folded = api.load_tokenizer(folder), product_speed.Folded(folder)
    assert plain is not None
    ids = plain.encode("def main():")
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert folded.decode([id + size * (i % 3) for i, id in enumerate(ids)]) == plain.decode(ids) == "def main():"


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_forwards_of_the_product_are_counted_after_the_first(
    size: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that shows an hour for the prompt and another for capturing, and then a second a forward."""
    monkeypatch.setattr(product_speed, "NEW_TOKENS", 11)
    readings = itertools.chain([3600.0, 7200.0], itertools.count(7201.0))
    monkeypatch.setattr(product_speed, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    defaults = GenerationDefaults({}, (), None, None)
    target = decoder("qwen3_5")
    model = api.Model(embedded_model(), target, None, product_speed.Folded(embedded_model()), defaults, LoadReport())
    (out, *others), ms = product_speed.timed(model, [[4, 5, 6]] * size, k)
    assert ms == 1000.0
    assert [o.tokens for o in others] == [out.tokens] * (size - 1)
    assert len(out.tokens) == 11
    assert out.text
    assert out.rounds == (0 if k == 0 else len(out.draft_rounds))


def test_the_product_is_measured_with_and_without_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_speed, "NEW_TOKENS", 9)
    calls: list[int] = []

    def timed(model: Any, prompts: list[list[int]], k: int) -> tuple[Any, float]:
        calls.append(k)
        assert [len(p) for p in prompts] == [30, 30]
        one = {"tokens_per_second": 50.0 + k / 2, "rounds": 4}
        return [SimpleNamespace(**one, accepted=accepted) for accepted in (2, 0)], 2.0 + k

    monkeypatch.setattr(product_speed, "timed", timed)
    assert product_speed.product_speed(decoder("qwen3_5"), 2, 30, 3) == {
        "generate_tokens": 9,
        "generate_step_ms": 2.0,
        "generate_step_tokens_per_s": 100.0,
        "generate_round_ms": 5.0,
        "generate_round_tokens_per_s": 103.0,
        "generate_accept_length": 1.25,
    }
    assert calls == [0, 0, 3, 3]
