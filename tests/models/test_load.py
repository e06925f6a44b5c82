"""Loading fills every parameter or says which checkpoint tensor is wrong; saving is its inverse; memory is bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from nextn.models.context import SequenceContext
from nextn.models.decoder import Decoder
from nextn.models.load import load_decoder, load_drafter
from nextn.models.save import decoder_state
from tests.oracle.checkpoints import KINDS, hf_model, make_checkpoint, random_head

CPU = torch.device("cpu")
State = dict[str, torch.Tensor]


def load(folder: Path, mtp: bool = True) -> Decoder:
    return load_decoder(open_checkpoint(folder), dtype=torch.float32, device=CPU, mtp=mtp)[0]


def rewrite(folder: Path, change: Callable[[State], None]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("experts", ["split", "grouped"])
@pytest.mark.parametrize("kind", KINDS)
def test_saving_is_the_inverse(tmp_path: Path, kind: str, experts: str) -> None:
    folder = make_checkpoint(tmp_path, kind)
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    prefix = "model.language_model." if kind == "qwen3_5_nested" else "model."
    state = decoder_state(load(folder), config, dtype=torch.float32, prefix=prefix, experts=experts)
    own = {k: v for k, v in state.items() if k in stored}
    assert all(torch.equal(v, stored[k]) for k, v in own.items())
    assert set(state) == set(own) or "moe" in kind or kind == "qwen3_next"
    assert {k for k in stored if k not in state and ".experts." not in k and "visual" not in k} == set()


def test_grouped_and_split_experts_are_one_model(tmp_path: Path) -> None:
    """transformers writes the target's experts grouped or split by its version; the head is given both ways here."""
    split = make_checkpoint(tmp_path / "split", "qwen3_5_moe")
    config = json.loads((split / "config.json").read_text())
    model = load(split)
    grouped = tmp_path / "grouped"
    grouped.mkdir()
    (grouped / "config.json").write_text(json.dumps(config))
    save_file(decoder_state(model, config, dtype=torch.float32, experts="grouped"), grouped / "model.safetensors")
    again = load(grouped)
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5")
    rewrite(folder, lambda s: s.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(NextnError, match=r"lacks 1 tensor that.*model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(folder)


@pytest.mark.parametrize("mtp", [True, False])
def test_a_head_alone_is_no_target(tmp_path: Path, mtp: bool) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5")

    def leave_head(state: State) -> None:
        for key in [k for k in state if not k.startswith("mtp.")]:
            state.pop(key)

    rewrite(folder, leave_head)
    with pytest.raises(NextnError, match="holds no layer of the model: it is a head alone"):
        load(folder, mtp)


def test_missing_head_tensor_is_named_and_does_not_matter_without_the_head(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5")
    rewrite(folder, lambda s: s.pop("mtp.fc.weight"))
    with pytest.raises(NextnError, match=r"mtp\.fc\.weight.*--no-mtp"):
        load(folder)
    assert load(folder, mtp=False).mtp is None


def test_no_head(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5", head=False)
    with pytest.raises(NextnError, match=r"holds no MTP head.*--no-mtp") as caught:
        load(folder)
    assert caught.value.exit_code == 2


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    rewrite(folder, lambda s: s.update({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 2)}))
    with pytest.raises(NextnError, match=r"lora_A\.weight"):
        load(folder)


def test_vision_tensors_and_copies_are_skipped_and_listed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5_nested", tied=True)
    rewrite(folder, lambda s: s.update({"lm_head.weight": s["model.language_model.embed_tokens.weight"].clone()}))
    _, report = load_decoder(open_checkpoint(folder), dtype=torch.float32, device=CPU)
    assert set(report.skipped) == {"model.visual.patch_embed.proj.weight", "lm_head.weight"}


@pytest.mark.parametrize("key", ["mtp.fc.weight", "model.layers.0.mlp.down_proj.weight"])
def test_wrong_shape_gives_both_shapes(tmp_path: Path, key: str) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5")
    rewrite(folder, lambda s: s.update({key: s[key].t().contiguous()}))
    with pytest.raises(NextnError, match=r"shape \[\d+, \d+\] where the model needs \[\d+, \d+\]"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights(tmp_path: Path, value: float) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5")
    rewrite(folder, lambda s: s["mtp.norm.weight"].__setitem__(3, value))
    with pytest.raises(NextnError, match=r"mtp\.norm\.weight.*NaN or infinite"):
        load(folder)


def test_parts_that_are_not_there(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5")
    (folder / "model.safetensors").rename(folder / "model.bin")
    with pytest.raises(NextnError, match="has no readable safetensors weights"):
        load(folder)
    (folder / "model.bin").rename(folder / "model.safetensors")
    (folder / "config.json").unlink()
    with pytest.raises(NextnError, match=r"has no config\.json"):
        load(folder)


def test_truncated_file(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(NextnError, match="truncated"):
        load(folder)


def test_quantised_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(NextnError, match=r"quantised weights \(fp8\).*inspect"):
        load(folder)


def test_unknown_architecture(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "x", "architectures": ["XForCausalLM"]}))
    with pytest.raises(NextnError, match="cannot decode this architecture"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding-window"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"hidden_size": None}, "lacks hidden"),
    ],
)
def test_what_is_not_run_is_refused(tmp_path: Path, change: dict[str, object], what: str) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(NextnError, match=what):
        load(folder)


def test_a_window_that_no_layer_uses_is_fine(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")
    config = json.loads((folder / "config.json").read_text())
    unused = {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}
    (folder / "config.json").write_text(json.dumps({**config, **unused}))
    load(folder)


def test_head_from_another_checkpoint(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3_5")
    head = tmp_path / "head"
    head.mkdir()
    config = json.loads((base / "config.json").read_text())
    other = random_head(config, seed=9)
    (head / "config.json").write_text(json.dumps(config))
    save_file(other, head / "model.safetensors")
    model, _ = load_decoder(open_checkpoint(base), dtype=torch.float32, device=CPU, head=open_checkpoint(head))
    assert model.mtp is not None
    assert torch.equal(model.mtp.fusions[0].fuse.weight, other["mtp.fc.weight"])


def test_separate_draft_is_a_model_of_its_own(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, "qwen3_5"))
    model, report = load_decoder(checkpoint, dtype=torch.float32, device=CPU)
    draft, draft_report = load_drafter(checkpoint, dtype=torch.float32, device=CPU)
    assert draft_report.head_bytes == report.head_bytes
    assert draft_report.weight_bytes == report.head_bytes + 2 * 97 * 32 * 4
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in draft.parameters()}
    assert not shared
    for name, param in draft.named_parameters():
        assert torch.equal(param, model.get_parameter(name)), name


def test_peak_memory_is_near_the_weights(tmp_path: Path) -> None:
    """A checkpoint of 170 MB in bf16, loaded as float32 and as bf16 in a process that has loaded a small one before."""
    small = make_checkpoint(tmp_path / "small", "qwen3")
    sizes = {"vocab_size": 50_000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    hf_model("qwen3", **sizes).to(torch.bfloat16).save_pretrained(tmp_path / "big", max_shard_size="40MB")
    script = """
import sys, torch
from nextn.checkpoint.source import open_checkpoint
from nextn.models.load import load_decoder

def status(field):
    return int(next(l for l in open("/proc/self/status") if l.startswith(field)).split()[1]) * 1024

def load(folder):
    dtype = getattr(torch, sys.argv[3])
    return load_decoder(open_checkpoint(folder), dtype=dtype, device=torch.device("cpu"), mtp=False)

load(sys.argv[1])
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
kept, report = load(sys.argv[2])
print((status("VmHWM") - before) / report.weight_bytes)
"""
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-c", script, str(small), str(tmp_path / "big"), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert 0.95 < float(done.stdout) < 1.1


def test_gradients_pass_through_a_model_that_has_decoded(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, "qwen3_5"))
    ids, rows = torch.tensor([[1, 2, 3]]), SequenceContext(torch.arange(3)[None])
    with torch.inference_mode():
        expected = model(ids, rows)[0].clone()
    bias = torch.zeros(32, requires_grad=True)
    hidden, _ = model(ids, rows)
    (model.norm(hidden + bias)).sum().backward()
    assert bias.grad is not None
    assert torch.equal(hidden, expected)
