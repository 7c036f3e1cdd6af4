"""The HTML report: one file without outside references, and a page that a real browser can show and filter."""

import json
import math
import os
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from browsers import browser
from onegraph.check.judge import join
from onegraph.check.output import html, text
from onegraph.check.report import Event, Finding, Frame, Origin, Report, Severity, StorageInfo

EVIL = '</script><script>document.title="owned"</script><!-- <img src=x onerror=alert(1)>'


def finding(code: str, line: int, severity: Severity, source: str = "y = x.item()") -> Finding:
    return Finding(
        code=code,
        severity=severity,
        origin=Origin.SIMULATE,
        path="/code/model.py",
        line=line,
        column=7,
        source=source,
        message=f"message of {code}",
        happens="silently stale",
        values=("step 0: 1", "step 1: 2"),
        calls=(
            Frame(path="/code/model.py", line=1, function="factory.<locals>.step", source="model(x)"),
            Frame(path="/code/model.py", line=line, function="Model.forward", source=source),
        ),
        fix="mend it",
    )


def report(events: int = 900) -> Report:
    timeline = []
    for i in range(events):
        flagged = i % 300 == 10
        timeline.append(
            Event(
                index=i,
                name="aten::_local_scalar_dense" if flagged else "aten::add.Tensor",
                kind="sync" if flagged else "op",
                path="/code/model.py",
                line=20 if flagged else 30,
                module="Attention",
                reads=(1, 3),
                writes=() if flagged else (3,),
                allocates=() if i % 5 else (10 + i,),
                bytes=0 if i % 5 else 2048,
                codes=("CG101",) if flagged else (),
            )
        )
    return Report(
        target="model.py:factory",
        findings=(
            finding("CG101", 20, Severity.ERROR),
            finding("CG210", 40, Severity.WARNING, EVIL),
            finding("CG401", 50, Severity.UNVERIFIED),
        ),
        origins=(Origin.SOURCE, Origin.SIMULATE),
        steps=4,
        timeline=tuple(timeline),
        storages=(
            StorageInfo(number=1, kind="external", bytes=4096, name="model.weight"),
            StorageInfo(number=3, kind="input", bytes=64, name="x"),
            StorageInfo(number=10, kind="graph", bytes=2048),
        ),
        facts={
            "torch": "2.11.0",
            "replay error": 0.25,
            "largest replay error": math.inf,  # a replay that gives another shape; JSON has no word for it
            "read": [["/code/model.py", 1, 2]],
        },
    )


class Links(HTMLParser):
    """Everything in a page that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]


def test_page_is_self_contained_and_holds_hostile_text_as_data() -> None:
    page = html.render(report(20))
    links = Links()
    links.feed(page)
    assert links.found == []
    assert links.scripts == 2
    assert "url(" not in page
    assert "@import" not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data is not None
    (body,) = json.loads(data.group(1))
    assert [f["code"] for f in body["findings"]] == ["CG101", "CG210", "CG401"]
    assert body["findings"][1]["source"] == EVIL
    assert body["findings"][0]["module"] == "Attention"
    assert len(body["timeline"]) == 20
    assert "Infinity" not in data.group(1)


def shown(page: Path, address: str = "") -> str:
    """The page's elements after its script has run in headless Chromium."""
    command = [browser(), "--headless", "--disable-gpu", "--no-sandbox", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={page.parent / 'profile'}", page.as_uri() + address],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "HOME": str(page.parent)},
    )
    return done.stdout.split('id="data"')[0]


def rows(dom: str) -> list[str]:
    return re.findall(r'<tr class="[^"]*" id="event-(\d+)"', dom)


def cards(dom: str) -> list[str]:
    return re.findall(r'<article class="finding [a-z]+" data-code="(CG\d+)"', dom)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("html") / "report.html"
    path.write_text(html.render(report()), encoding="utf-8")
    return path


def test_browser_shows_verdict_findings_timeline_and_storages(page: Path) -> None:
    dom = shown(page)
    assert "<title>not capturable: model.py:factory</title>" in dom  # not what the hostile text asked for
    assert "Not capturable</h1>" in dom
    assert cards(dom) == ["CG101", "CG210", "CG401"]
    assert "Attention, " in dom  # grouped by module where the timeline knows it
    assert "&lt;/script&gt;&lt;script&gt;" in dom
    assert len(rows(dom)) == 400  # the rest behind a button: a step may have ten thousand ops
    assert "show 500 more" in dom
    assert dom.count('<tr class="flagged"') == 2
    assert "model.weight" in dom
    assert '<svg width="420"' in dom
    assert "replay error <b>0.25</b>" in dom


FILTERS = {
    "#q=CG210": (["CG210"], 400),
    "#sev=error": (["CG101"], 400),
    "#code=CG401": (["CG401"], 400),
    "#q=no+such+text": ([], 400),
    "#kind=sync": (["CG101", "CG210", "CG401"], 3),
    "#flagged=1": (["CG101", "CG210", "CG401"], 3),
    "#text=_local_scalar": (["CG101", "CG210", "CG401"], 3),
    "#at=15": (["CG101", "CG210", "CG401"], 1),
}
VISIT = """<script>(async () => {
  const seen = [];
  for (const address of %s) {
    if (address !== location.hash) {
      const there = new Promise(then => addEventListener("hashchange", then, {once: true}));
      location.hash = address;
      await there;
    }
    const cards = [...document.querySelectorAll("article.finding")].map(card => card.dataset.code);
    seen.push([cards, document.querySelectorAll('tr[id^="event-"]').length]);
  }
  document.body.prepend("seen: " + JSON.stringify(seen) + ".");
})()</script>"""


@pytest.fixture(scope="module")
def filtered(page: Path) -> dict[str, list[object]]:
    """Codes of the cards and number of the rows at each address: opened at the first one, which leads to the others."""
    visited = page.with_name("visited.html")
    visited.write_text(page.read_text(encoding="utf-8") + VISIT % json.dumps([*FILTERS]), encoding="utf-8")
    seen = re.search(r"seen: (.*?)\.", shown(visited, next(iter(FILTERS))))
    assert seen is not None
    return dict(zip(FILTERS, json.loads(seen.group(1)), strict=True))


@pytest.mark.parametrize("address", FILTERS)
def test_browser_filters(filtered: dict[str, list[object]], address: str) -> None:
    assert filtered[address] == [*FILTERS[address]]


def test_browser_shows_a_clean_source_report(tmp_path: Path) -> None:
    path = tmp_path / "clean.html"
    path.write_text(html.render(Report(target="src", origins=(Origin.SOURCE,), facts={"unread": ["a.py: syntax"]})))
    dom = shown(path)
    assert "Nothing found in the source" in dom
    assert "Nothing to report." in dom
    assert "a.py: syntax" in dom
    assert re.search(r'<section id="timeline-part" hidden', dom)


def test_facts_ops_and_memory_of_several_targets_are_each_ones_own() -> None:
    """One page once said "replay equals eager" beside a finding that is silently stale: of another target."""
    bad, good = report(3), replace(report(5), target="other.py:factory", findings=())
    for each, equal in ((bad, False), (good, True)):
        each.facts["replay equals eager"] = equal
        del each.facts["read"]
    whole = join([bad, good])
    pages = json.loads(html.render(whole).split('id="data">')[1].split("</script>")[0])
    assert [page["target"] for page in pages] == [whole.target, "model.py:factory", "other.py:factory"]
    assert [page["verdict"] for page in pages] == ["not capturable", "not capturable", "capturable"]
    assert [page["facts"].get("replay equals eager") for page in pages] == [None, False, True]
    assert [len(page["timeline"]) for page in pages] == [0, 3, 5]
    assert [len(page["storages"]) for page in pages] == [0, 3, 3]
    told = text.render(whole)
    assert "model.py:factory: not capturable" in told
    assert "other.py:factory: capturable" in told
    assert told.splitlines()[-1].startswith("2 targets: not capturable (1 error")


def test_what_is_left_out_of_a_report_is_left_out_of_its_targets() -> None:
    first, second = report(3), replace(report(5), target="other.py:factory")
    for each in (first, second):
        del each.facts["read"]
    whole = join([first, second]).select(["CG401"])
    assert [[f.code for f in each.findings] for each in whole.each] == [["CG401"], ["CG401"]]
    again = Report.from_json(whole.to_json())
    assert [each.target for each in again.each] == ["model.py:factory", "other.py:factory"]
    assert again.each[1].facts["torch"] == "2.11.0"
