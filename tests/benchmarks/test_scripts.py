"""The command lines of benchmarks: started either way, refusals in a sentence, records that name no local folder."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import command_line

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if 'if __name__ == "__main__"' in path.read_text()
)
GPU = {
    "beside_sglang": ["DIR", "--out", "x.json"], "decode": [], "divergence": [], "kernels": [], "tune_rows": [],
    "tune_in_place": ["4b:4"], "delta_programs": [],
    "sampled": ["--out", "x.json"], "start_up": ["--geometry", "4b"], "train_step": ["--out", "x.json"],
}  # fmt: skip


def test_every_script_starts_by_its_path_and_as_a_module(tmp_path: Path) -> None:
    """In one process for each way, as importing torch takes seconds; each script finds the path as it would alone."""
    program = tmp_path / "help.py"
    program.write_text(
        "import contextlib, io, json, runpy, sys\n"
        "place, names, begin = sys.argv[1], sys.argv[2:], sys.path[1:]\n"
        "sys.argv[1:] = ['--help']\n"
        "found = {}\n"
        "for name in names:\n"
        "    for module in [m for m in sys.modules if m.split('.')[0] in ('benchmarks', 'tests')]:\n"
        "        del sys.modules[module]\n"
        "    sys.path[:] = [place, *begin]\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n"
        "        if place.endswith('benchmarks'):\n"
        "            runpy.run_path(f'{place}/{name}.py', run_name='__main__')\n"
        "        else:\n"
        "            runpy.run_module(f'benchmarks.{name}', run_name='__main__')\n"
        "    found[name] = out.getvalue()\n"
        "print(json.dumps(found))\n"
    )
    for place in (ROOT / "benchmarks", ROOT):
        command = [sys.executable, str(program), str(place), *SCRIPTS]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        for name, text in json.loads(done.stdout.splitlines()[-1]).items():
            doc = ast.get_docstring(ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text()))
            assert doc is not None
            assert doc in text, name


def test_no_script_writes_a_file_unasked() -> None:
    for name in SCRIPTS:
        tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text())
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and any(
                isinstance(a, ast.Constant) and a.value == "--out" for a in call.args
            ):
                assert "default" not in {k.arg for k in call.keywords}, name


@pytest.mark.parametrize("name", GPU)
def test_without_a_gpu_there_is_a_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"somewhere/{name}.py", *GPU[name]])
    with pytest.raises(SystemExit) as refused:
        importlib.import_module(f"benchmarks.{name}").main()
    assert refused.value.code == 2
    assert capsys.readouterr().err.startswith(f"{name}.py measures on an NVIDIA GPU, and torch sees none here.\n")


def test_without_triton_every_script_shows_its_help_or_says_what_to_install(tmp_path: Path) -> None:
    """As after an installation without extras."""
    program = tmp_path / "bare.py"
    program.write_text(
        "import contextlib, io, runpy, sys\n"
        "sys.modules['triton'] = sys.modules['pytest'] = None\n"
        "sys.path[0], *names = sys.argv[1:]\n"
        "sys.argv[1:] = ['--help']\n"
        "for name in names:\n"
        "    for module in [m for m in sys.modules if m.split('.')[0] in ('benchmarks', 'tests')]:\n"
        "        del sys.modules[module]\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):\n"
        "        try:\n"
        "            runpy.run_module(f'benchmarks.{name}', run_name='__main__')\n"
        "        except SystemExit as end:\n"
        "            text, code = out.getvalue(), end.code or 0\n"
        "    assert code == 0 or (code == 2 and 'pip install' in text), (name, code, text)\n"
    )
    done = subprocess.run(
        [sys.executable, str(program), str(ROOT), *SCRIPTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_script_that_records_its_gpu_refuses_without_one() -> None:
    """What writes the name of a GPU is in the list above."""
    uses = {n for n in SCRIPTS if "gpu_timing import" in (ROOT / "benchmarks" / f"{n}.py").read_text()}
    assert uses <= set(GPU)


def test_no_processes_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import scheduler_traces

    monkeypatch.setattr(sys, "argv", ["scheduler_traces.py", "--jobs", "0"])
    with pytest.raises(SystemExit) as refused:
        scheduler_traces.main()
    assert refused.value.code == 2
    assert "--jobs: '0' is no whole number of 1 or more" in capsys.readouterr().err


# Python's int() takes the separators 0x1c to 0x1f for spaces only beside characters that are not ASCII.
TEXT = st.text(st.characters(exclude_characters="\x1c\x1d\x1e\x1f"))


@given(st.one_of(st.integers().map(str), TEXT))
def test_counts(text: str) -> None:
    wanted = int(text) if re.fullmatch(r"\s*[+-]?\d+(_\d+)*\s*", text) else None
    if wanted is not None and wanted >= 1:
        assert command_line.positive(text) == wanted
    else:
        with pytest.raises(argparse.ArgumentTypeError):
            command_line.positive(text)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--full", "--out", "/tmp/run 1/decode.json"], "--full --out benchmarks/results/decode.json"),
        (["--out=../x/pair.json", "--batch", "1", "8"], "--out benchmarks/results/pair.json --batch 1 8"),
        (["/srv/packed/sglang", "--out", "pair.json"], "sglang --out benchmarks/results/pair.json"),
        (["--note", "two words"], "--note 'two words'"),
    ],
)
def test_the_recorded_command(words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for script in ("/home/someone/nextn/benchmarks/decode.py", "benchmarks/decode.py", "decode.py"):
        monkeypatch.setattr(sys, "argv", [script, *words])
        assert command_line.recorded() == f"python benchmarks/decode.py {shown}"
    assert command_line.recorded("src/here").endswith(shown.replace("benchmarks/results", "src/here"))


def test_no_record_names_a_local_folder() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        command = json.loads(path.read_text()).get("command", "")
        assert not re.search(r"(^|[\s='\"])[/~]|\.\./|\$", command), path.name


def test_a_pair_keeps_its_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import beside_sglang, gpu_timing

    packed, out = tmp_path / "packed", tmp_path / "pair.json"
    packed.mkdir()
    (packed / "run.sh").write_text("")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    pytest.importorskip("triton")
    assert beside_sglang.provenance is gpu_timing.provenance

    def ours(geometry: str, batches: list[int]) -> dict[int, dict[str, Any]]:
        return {batch: {"step_ms": 1.0 * batch, "round_ms": 2.0 * batch} for batch in batches}

    def theirs(folder: Path, geometry: str, mode: str, seconds: int) -> dict[int, float]:
        return {1: 3.0} if mode == "mtp" else {}

    monkeypatch.setattr(beside_sglang, "ours", ours)
    monkeypatch.setattr(beside_sglang, "theirs", theirs)
    words = [str(packed), "--batch", "1", "8", "--note", "Another process ran.", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["beside_sglang.py", *words])
    beside_sglang.main()
    record = json.loads(out.read_text())
    assert record["note"] == f"{beside_sglang.NOTE} Another process ran."
    assert str(tmp_path) not in json.dumps(record)
    assert record["command"].endswith("--out benchmarks/results/pair.json")
    assert [(r["batch"], r["nextn_round_ms"], r["sglang_round_ms"], r["sglang_step_ms"]) for r in record["rows"]] == [
        (1, 2.0, 3.0, None),
        (8, 16.0, None, None),
    ]


def test_a_log_of_an_earlier_run_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import beside_sglang

    monkeypatch.setattr(beside_sglang, "RESULTS", tmp_path)
    log = tmp_path / "log_4b_mtp.txt"
    log.write_text('ROW {"bs": 1, "step_ms": 1.0}\n')
    (tmp_path / "run.sh").write_text("exit 1\n")
    assert beside_sglang.theirs(tmp_path, "4b", "mtp", 1) == {}
    (tmp_path / "run.sh").write_text(f'echo \'ROW {{"bs": 8, "step_ms": 2.34567}}\' > {log}\n')
    assert beside_sglang.theirs(tmp_path, "4b", "mtp", 1) == {8: 2.3457}
