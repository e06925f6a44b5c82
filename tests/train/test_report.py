"""The report says what the log says, needs no other file, and survives a log that was cut."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nextn.errors import NextnError
from nextn.train.report import POINTS, write_report

SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """Table rows and outside references of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.references: list[str] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True
        self.references += [v or "" for k, v in attributes if k in ("src", "href", "xlink:href") and v]
        assert tag not in ("script", "link", "iframe")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def measured(length: float, acceptance: list[float], domain: float) -> dict[str, Any]:
    return {
        "draft_tokens": len(acceptance),
        "accept_length": length,
        "acceptance": acceptance,
        "rounds": 1234,
        "buckets": [{"from": 0, "to": 128, "accept_length": length}, {"from": 129, "to": None, "accept_length": 1.5}],
        "domains": {"<code>": {"accept_length": domain}},
    }


def write_log(folder: Path, records: list[Any], tail: str = "") -> Path:
    (folder / "logs").mkdir()
    (folder / "logs" / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return folder


def step(number: int, **other: Any) -> dict[str, Any]:
    return {
        "step": number,
        "loss": 2 / number,
        "loss_by_step": [2 / number, 3 / number],
        "lr": 1e-3,
        "tokens": 100 * number,
        "tokens_per_second": 50.0,
        "time": 2.0 * number,
        **other,
    }


def charts(text: str) -> dict[str, ET.Element]:
    found = {}
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        element = ET.fromstring(svg)
        titles = [t.text for t in element.iter(f"{SVG}text")]
        name = next(t for t in titles if t and re.fullmatch("[a-z][a-z ]+", t) and t not in ("step", "all"))
        found[name] = element
    return found


def test_before_and_after_and_curves(tmp_path: Path) -> None:
    records = [
        {"step": 0, "eval": measured(1.5, [0.4, 0.1], 1.25)},
        *[step(n) for n in range(1, 21)],
        {"step": 10, "eval": measured(2.25, [0.75, 0.5], 2.0)},
        {"step": 20, "eval": measured(2.0, [0.7, 0.3], 2.5)},
    ]
    path = write_report(write_log(tmp_path, records, '{"step": 21, "lo'))
    text = path.read_text()
    page = Page(text)
    assert path == tmp_path / "report.html"
    assert page.rows[1:] == [
        ["accept length", "1.500", "2.250", "+0.750"],
        ["acceptance of draft 1", "40.0 %", "75.0 %", "+35.0 points"],
        ["acceptance of draft 2", "10.0 %", "50.0 %", "+40.0 points"],
        ["accept length, context 0-128", "1.500", "2.250", "+0.750"],
        ["accept length, context 129+", "1.500", "1.500", "+0.000"],
        ["accept length, <code>", "1.250", "2.000", "+0.750"],
    ]
    assert "step 10, the one accepted best" in text
    assert "20 steps, 2,000 tokens, 0.7 minutes" in text
    assert all(r.startswith("#") for r in page.references)
    assert set(charts(text)) == {
        "loss by draft step",
        "acceptance by position",
        "accept length",
        "tokens per second",
        "learning rate",
    }


def test_a_run_without_evaluation_says_so(tmp_path: Path) -> None:
    odd = step(2, loss_by_step=[None, 1.0])
    text = write_report(write_log(tmp_path, [step(1), odd, step(3)])).read_text()
    assert "was not evaluated" in text
    assert set(charts(text)) == {"loss by draft step", "tokens per second", "learning rate"}


def test_long_logs_are_thinned_and_end_where_they_end(tmp_path: Path) -> None:
    whole = write_log(tmp_path, [step(n, tokens_per_second=float(n % 7 + n)) for n in range(1, 4003)])
    text = write_report(whole).read_text()
    drawn = charts(text)["tokens per second"]
    longest = max((p.get("d", "") for p in drawn.iter(f"{SVG}path")), key=len)
    points = re.findall(r"[ML] ([\d.]+) ([\d.]+)", longest)
    assert POINTS / 2 < len(points) <= POINTS + 1
    assert len(text) < 400_000


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NextnError, match="no log"):
        write_report(tmp_path)
