"""`onegraph check --fix`: each rewrite takes its finding away, keeps eager's results and all else in the file."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

import pytest

from onegraph.check import CheckError, cli
from onegraph.check.api import check_target
from onegraph.check.report import Report, relative
from onegraph.check.rewrite import RewritePlan, plan, text, verify
from onegraph.check.targets import Options

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F


def factory():
    torch.manual_seed(0)
    table = torch.arange(32.0, device="cuda").view(8, 4)
    cache = torch.zeros(8, 4, device="cuda")
    model = nn.Linear(4, 4, device="cuda")
    rows = torch.tensor([1, 2], device="cuda")
"""
TAIL = """
    return step, lambda i: (torch.full((3, 4), i - 1.0, device="cuda"), torch.full((), i % 3, device="cuda"))
"""

REWRITES = {
    "literal": (
        "",
        "return x * torch.tensor([1.0, 2.0, 3.0, 4.0], device='cuda')  # a scale",
        "return x * constant  # a scale",
    ),
    "literal bound to a name": (
        "",
        "s = torch.tensor([[2.0], [3.0], [4.0]]).cuda()\nreturn x * s",
        "s = s_constant\nreturn x * s",
    ),
    "list index": ("", "return x[[0, -1]] * 2", "return x[constant] * 2"),
    "one_hot": (
        "",
        "return F.one_hot(at[None].clamp(min=7)).float() @ table",
        "return F.one_hot(at[None].clamp(min=7), num_classes=table.shape[-2:][0]).float() @ table",
    ),
    "number by device index": (
        "",
        "cache[rows] = 3.0  # mark\nreturn cache + 1",
        "cache.index_fill_(0, rows.reshape(-1), 3.0)  # mark\nreturn cache + 1",
    ),
    "row by device index": (
        "",
        "cache[at] = x[1]\nreturn cache + 1",
        "cache[at.reshape(1)] = x[1]\nreturn cache + 1",
    ),
    "row by a number that was read": (
        "",
        "cache[int(at) - 0 if False else at.item()] = x[1]\nreturn cache + 1",
        None,
    ),
    "row by item": (
        "",
        "cache[at.item()] = x[1]\nreturn cache + 1",
        "cache[at.reshape(1)] = x[1]\nreturn cache + 1",
    ),
    "row read": ("", "return x + table[at.item()]", "return x + table[at.reshape(1)][0]"),
    "copy": (
        "host = torch.arange(4.0)  # on the host",
        "return x * host.to('cuda')",
        "return x * host.to('cuda', non_blocking=True)",
    ),
    "pinned copy": (
        "host = torch.arange(4.0).pin_memory()",
        "return cache.copy_(host) + 1",
        "return cache.copy_(host, non_blocking=True) + 1",
    ),
    "optimizer": (
        "optimizer = torch.optim.Adam(model.parameters(), lr=0.1)",
        "optimizer.zero_grad()\nloss = model(x).sum()\nloss.backward()\noptimizer.step()\nreturn loss",
        "optimizer.zero_grad()\nloss = model(x).sum()\nloss.backward()\noptimizer.step()\nreturn loss",
    ),
    "mask write": (
        "",
        "y = x * 1\ny[y > 0] = y.mean()\nreturn y",
        "y = x * 1\ny.copy_(torch.where(y > 0, y.mean(), y))\nreturn y",
    ),
    "mask update": (
        "",
        "y = x * 1\ny[~y.isnan() & (y < 1)] *= 0.5\nreturn y",
        "y = x * 1\ny.copy_(torch.where(~y.isnan() & (y < 1), y * 0.5, y))\nreturn y",
    ),
}
UNSURE = {
    "the tensor is written": "s = torch.tensor([1.0, 2.0, 3.0, 4.0], device='cuda')\ns.add_(x[0])\nreturn x * s",
    "the tensor is returned": "return torch.tensor([1.0, 2.0], device='cuda')",
    "values are the caller's": "n = 3.0\nreturn x[0] * torch.tensor([n, 2.0, 3.0, 4.0], device='cuda')",
    "nobody says how many classes": "return F.one_hot(at[None]).sum(0)",
    "another mask": "y = x * 1\ny[x[:, 0] > 0] = x[0]\nreturn y",
    "as many values as the mask has": "y = x * 1\ny[y > 0] = x[0].repeat(3)[: (y > 0).sum()]\nreturn y",
    "a row that is kept": "row = table[at.item()]\nrow.add_(1)\nreturn row + x",
    "a branch": "if x.sum() > 0:\n    return x * 2\nreturn x",
}


def source(before: str, body: str) -> str:
    made = f"    {before}\n" if before else ""
    return f"{HEAD}{made}\n    def step(x, at):\n{indent(body, ' ' * 8)}\n{TAIL}"


def target(folder: Path, before: str, body: str) -> Path:
    path = folder / "steps.py"
    path.write_text(source(before, body))
    return path


def run(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers(dest="command"))
    args = parser.parse_args([str(a) for a in argv])
    return int(args.run(args))


class Looking:
    """`verify.look` in this process, which a test can wait for: what a check of its own costs is mostly starting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        monkeypatch.setattr("onegraph.check.rewrite.look", self)

    def __call__(self, spec: str, edited: dict[str, bytes], root: str, options: Options):
        where, colon, _ = spec.rpartition(":") if ":" in Path(spec).name else (spec, "", "")
        path = Path(where)
        kept = path.read_bytes()
        self.looks += 1
        try:
            path.write_bytes(edited.get(str(path), kept))
            report = check_target(spec, options)
            return verify.Seen(report, verify.results(spec, 4, options.gpus) if colon else None)
        finally:
            path.write_bytes(kept)


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> Looking:
    return Looking(monkeypatch)


def planned(path: Path) -> tuple[RewritePlan, str]:
    made = plan(f"{path}:factory")
    return made, made.changed.get(str(path), path.read_text())


@pytest.mark.parametrize("name", [name for name, (*_, after) in REWRITES.items() if after is not None])
def test_a_rewrite_takes_its_finding_away_and_keeps_the_results(name, tmp_path, looking):
    before, body, after = REWRITES[name]
    path = target(tmp_path, before, body)
    kept = verify.results(f"{path}:factory", 5, 1)
    made, new = planned(path)
    assert made.before.errors
    assert made.report.findings == ()
    assert made.left == ()
    assert indent(after, " " * 8) in new
    path.write_text(new)
    assert verify.equal(kept, verify.results(f"{path}:factory", 5, 1), rounded=name == "optimizer")
    assert {line for line in path.read_text().splitlines() if "#" in line} or "#" not in source(before, body)


@pytest.mark.parametrize("name", [*UNSURE, "row by a number that was read"])
def test_what_is_not_sure_is_left_alone(name, tmp_path, looking):
    path = target(tmp_path, "", UNSURE.get(name) or REWRITES[name][1])
    made, new = planned(path)
    assert made.diff() == ""
    assert new == path.read_text()
    assert made.left == made.before.counted


def test_a_constant_of_a_module_becomes_a_buffer(tmp_path, looking):
    path = tmp_path / "steps.py"
    path.write_text(
        dedent(
            """\
            import torch


            class Scale(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.gain = 2.0  # of both

                def forward(self, x):
                    return x[:, [0, 1]] * 0 + x[[1, 0]] * self.gain


            def factory():
                return Scale().to("cuda"), lambda i: (torch.full((2, 2), float(i), device="cuda"),)
            """
        )
    )
    path.write_text(path.read_text().replace("x[:, [0, 1]] * 0 + ", ""))
    made, new = planned(path)
    assert made.report.findings == ()
    assert '        self.register_buffer("constant", torch.tensor([1, 0]), persistent=False)\n' in new
    assert "return x[self.constant] * self.gain" in new


def test_several_are_tried_at_once_and_those_that_hold_are_kept(tmp_path, looking):
    body = "y = x * 1\ny[y > 0] = y.mean()\ncache[at] = y[0]\nreturn y + cache[rows].sum().item()"
    path = target(tmp_path, "", body)
    made, new = planned(path)
    assert {f.code for f in made.done} == {"CG101", "CG104"}
    assert [f.code for f in made.left] == ["CG101"]
    assert "cache[at.reshape(1)] = y[0]" in new
    assert looking.looks <= 4


def test_what_is_left_is_told_by_the_lines_of_the_file_as_it_is(tmp_path, looking):
    body = "y = x[[0, 1, 2]] * 1\ncache[at] = 3.0\nn = y.sum().item()\nreturn y + n + cache.mean()"
    path = target(tmp_path, "", body)
    line = path.read_text().splitlines().index("        n = y.sum().item()") + 1
    made, new = planned(path)
    told = list(made.told(written=False))
    assert made.left[0].line == line + 1  # a constant was made above it
    assert new.splitlines()[line] == "        n = y.sum().item()"
    assert told[0].endswith("2 findings would be fixed; --fix --write changes the files")
    assert told[1].endswith(": 1 without a mechanical fix:")
    assert told[2].lstrip().startswith(f"{relative(str(path))}:{line}: CG101 ")
    assert list(made.told(written=True))[2].lstrip().startswith(f"{relative(str(path))}:{line + 1}: CG101 ")


def test_a_line_that_was_rewritten_is_told_as_one_it_was_made_of():
    old = text.of("a.py", "a = 1\nb = 2\nc = 3\nd = 4\n", "utf-8")
    assert old is not None
    assert [old.line_of("a = 1\nx = 0\ny = 0\nB = 2\nc = 3\nd = 4\n", n) for n in (1, 2, 4, 5, 6)] == [1, 2, 2, 3, 4]
    assert old.line_of("n = 0\na = 1\nb = 2\nc = 3\nd = 4\n", 1) == 1
    assert old.line_of("a = 1\nd = 4\n", 2) == 4


def test_where_nothing_is_rewritten_it_says_so_once(tmp_path, looking):
    path = target(tmp_path, "", "n = x.sum().item()\nreturn x * n")
    told = list(planned(path)[0].told(written=False))
    assert [told[0], len(told)] == [f"{path}:factory: 1 finding without a mechanical fix:", 2]


def test_a_rewrite_that_changes_results_is_refused(tmp_path, monkeypatch, looking):
    path = target(tmp_path, "", REWRITES["row read"][1])
    monkeypatch.setattr(
        "onegraph.check.rewrite.mechanical._primary",
        lambda file, node: "(at * 0)" if "at" in file.of(node) else file.of(node),
    )
    assert planned(path)[0].diff() == ""


def test_a_file_alone_gets_what_needs_no_run(tmp_path):
    path = target(tmp_path, "", "return x * torch.tensor([1.0, 2.0, 3.0, 4.0], device='cuda') + x[[0, 1, 2]]")
    path.write_text(
        path.read_text()
        + "\n\ngraph = torch.cuda.CUDAGraph()\nstep, inputs = factory()\n"
        + "with torch.cuda.graph(graph):\n    y = step(*inputs(0))\n"
    )
    made = plan(str(path))
    assert "x * constant + x[[0, 1, 2]]" in made.changed[str(path)]


def test_line_ends_encoding_and_comments_stay(tmp_path, looking):
    body = "é = x * 1  # größe\ncache[rows] = 3.0  # naïve\nreturn cache + é.sum()"
    path = tmp_path / "steps.py"
    path.write_bytes(("# -*- coding: latin-1 -*-\n" + source("", body)).replace("\n", "\r\n").encode("latin-1"))
    made = plan(f"{path}:factory")
    made.write()
    data = path.read_bytes()
    assert b"\n" not in data.replace(b"\r\n", b"")
    assert "cache.index_fill_(0, rows.reshape(-1), 3.0)  # naïve\r\n".encode("latin-1") in data
    old = made.files[str(path)]
    changed = set(data.splitlines()) - set(old.encoded(old.text).splitlines())
    assert len(changed) == 1


def test_a_file_that_was_changed_meanwhile_is_not_overwritten(tmp_path, looking):
    path = target(tmp_path, "", REWRITES["row read"][1])
    made, _ = planned(path)
    path.write_text("# mine\n" + path.read_text())
    with pytest.raises(CheckError, match="changed while it was checked"):
        made.write()
    assert path.read_text().startswith("# mine\n")


def test_edits_that_overlap_are_refused():
    file = text.of("/a.py", "x = 1\n")
    assert file is not None
    with pytest.raises(ValueError, match="overlap"):
        file.edited([text.Edit(0, 3, "a"), text.Edit(2, 4, "b")])


def test_the_command_shows_a_diff_and_writes_on_demand(tmp_path, capsys, monkeypatch):
    path = target(tmp_path, "", REWRITES["row read"][1])
    before = path.read_text()
    assert run("check", "--fix", f"{path}:factory") == 1
    shown = capsys.readouterr()
    assert "+        return x + table[at.reshape(1)][0]\n" in shown.out
    assert "1 finding would be fixed" in shown.err
    assert path.read_text() == before
    Looking(monkeypatch)  # the same checks again
    assert run("check", "--fix", "--write", f"{path}:factory") == 0
    assert "1 finding fixed" in capsys.readouterr().err
    assert path.read_text() == before.replace("table[at.item()]", "table[at.reshape(1)][0]")
    assert not list(tmp_path.glob("*.onegraph"))


def test_the_diff_applies(tmp_path, looking, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = target(tmp_path, "", REWRITES["mask write"][1])
    made, new = planned(path)
    subprocess.run(["patch", "-p1", "-s"], input=made.diff(), text=True, check=True, cwd=tmp_path)
    assert path.read_text() == new


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--write", "a.py:f"], "--write needs --fix"),
        (["--fix", "--json", "a.py:f"], "--json does not go with --fix"),
        (["--fix"], "got no target"),
        (["--fix", "{folder}"], "--fix needs a file or a factory"),
        (["--fix", "{folder}/none.py"], "no such file"),
        (["--fix", "{folder}/none.py:f"], "no such file"),
    ],
)
def test_wrong_use_is_one_line(argv, said, tmp_path, capsys):
    assert run("check", *(a.format(folder=tmp_path) for a in argv)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_step_that_raises_is_one_line(tmp_path, capsys):
    path = target(tmp_path, "", "return x + nothing")
    assert run("check", "--fix", f"{path}:factory") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_process_that_checks_again_has_the_same_time(tmp_path, monkeypatch, capsys):
    path = target(tmp_path, "", "while True:\n    pass")
    commands = []

    def started(command, **options):
        commands.append(command)
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(verify.subprocess, "run", started)
    with pytest.raises(CheckError, match=r"longer than 0\.5 seconds"):
        verify.look(f"{path}:factory", {}, str(tmp_path), Options(timeout_s=0.5))
    assert verify.main(f"{path}:factory", str(tmp_path / "out"), Options(**json.loads(commands[0][-1]))) == 2
    assert "after 0.5 s" in capsys.readouterr().err


def test_reading_alone_imports_no_torch():
    program = "import sys, onegraph.check.rewrite; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_report_of_a_plan_is_a_report(tmp_path, looking):
    assert isinstance(planned(target(tmp_path, "", "return x * 2"))[0].report, Report)
