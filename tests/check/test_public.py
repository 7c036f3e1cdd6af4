"""Bugs reported in public are found without a GPU by the default command, and their mended twins are clean."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_cli_check import run

HERE = Path(__file__).parent / "public"
STEPS = HERE / "steps.py"


@pytest.mark.parametrize(("name", "code"), [("talker", "CG104"), ("denoise", "CG206")])
def test_a_public_bug_is_found_and_its_mend_is_clean(name: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", f"{STEPS}:{name}_bad", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    errors = [(f["code"], f["line"]) for f in report["findings"] if f["severity"] == "error"]
    lines = STEPS.read_text().splitlines()
    (line,) = [n for n, text in enumerate(lines, 1) if f"# hazard: {code}" in text]
    assert errors == [(code, line)]
    assert run("check", f"{STEPS}:{name}_mended", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == []


def errors(report: dict[str, Any]) -> set[tuple[str, str]]:
    """(code, text of the line) of what counts as an error."""
    return {(f["code"], f["source"].strip()) for f in report["findings"] if f["severity"] == "error"}


DRAW = "draw[(1,)](u, seed % (2**31), off, 4, B=4)"
OPTIONAL = "p = positions + (zero if delta is None else delta)"
FACTORIES: dict[str, set[tuple[str, str]]] = {
    "optional_input:bad": {("CG205", OPTIONAL)},
    "optional_input:bad_late": {("CG205", OPTIONAL)},
    "optional_input:good": set(),
    "adapter_switch:host": {("CG201", "if self.active:")},
    "adapter_switch:slots": set(),
    "collectives:plain": {("CG310", "dist.all_reduce(y)")},
    "collectives:nccl": {("CG305", "dist.all_reduce(y, async_op=True)")},
    "collectives:waited": set(),
    "collectives:raced": {("CG305", "z = y * 2  # read while the group's stream may still write it")},
    "collectives:late_group": {("CG310", 'dist.all_reduce(x, group=made["group"])')},
    "collectives:objects": {
        ("CG310", "dist.barrier()"), ("CG310", 'dist.all_gather_object(found, {"rows": 2})'),
    },
    "philox_numbers:own_counter": {("CG202", 'draw[(1,)](u, 7, st["off"], 4, B=4)')},
    "philox_numbers:on_device": set(),
    "philox_numbers:generator_numbers": {
        ("CG302", "seed, off = gen.initial_seed(), gen.get_offset()"), ("CG302", "gen.set_offset(off + 4)"),
        ("CG202", DRAW),
    },
    "philox_numbers:own_generator_offset": {
        ("CG302", "seed, off = gen.initial_seed(), gen.get_offset()"), ("CG302", "gen.set_offset(off + 4)"),
        ("CG202", DRAW),
    },
    "philox_numbers:flashinfer_like": {
        ("CG302", "g.set_state(torch.tensor([seed, off + 4], dtype=torch.int64).view(torch.uint8))"), ("CG202", DRAW),
    },
    "philox_numbers:own_generator_state": {
        ("CG302", "g.set_state(torch.tensor([seed, off + 4], dtype=torch.int64).view(torch.uint8))"), ("CG202", DRAW),
    },
}  # fmt: skip


@pytest.mark.usefixtures("whole_scan")
@pytest.mark.parametrize("name", FACTORIES)
def test_reports_of_this_year(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, factory = name.split(":")
    if file == "philox_numbers":
        pytest.importorskip("triton")
    status = run("check", f"{HERE / file}.py:{factory}", "--json")
    assert errors(json.loads(capsys.readouterr().out)) == FACTORIES[name]
    assert status == bool(FACTORIES[name])


PROGRAMS: dict[tuple[str, str], set[tuple[str, str]]] = {
    ("graph_dropped", "good"): set(),
    ("graph_dropped", "del"): {("CG313", "del old")},
    ("graph_dropped", "reset"): {("CG313", "old.reset()")},
    ("graph_dropped", "cycle"): {("CG313", "gc.collect()")},
    ("cross_stream", "good"): set(),
    ("cross_stream", "bad"): {("CG209", "kept.append(o.clone())")},
    ("pinned_result", "good"): set(),
    ("pinned_result", "bad"): {("CG305", "print(host.tolist()[0][0], host[0, 0].item())")},
}


@pytest.mark.parametrize(("file", "word"), PROGRAMS)
def test_programs_of_this_year(file: str, word: str, capfd: pytest.CaptureFixture[str]) -> None:
    status = run("check", "--json", "--run", f"{HERE / file}.py", word)
    assert errors(json.loads(capfd.readouterr().out)) == PROGRAMS[file, word]
    assert status == bool(PROGRAMS[file, word])
