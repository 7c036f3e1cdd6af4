"""Whatever a file holds, reading a tree goes on, and says in one line what it could not read."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from onegraph.check.report import CheckError
from onegraph.check.source import check_tree
from onegraph.check.source.files import MAX_BYTES, Unreadable, decode, module_name, package_root, parse

GOOD = """\
import torch


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return x.item()
"""


DAMAGED = {
    "syntax": (b"import torch\ndef f(:\n", "syntax error"),
    "null": (b"import torch\n\0\n", "null bytes"),
    "utf16": ("import torch\n".encode("utf-16") + b" torch", "null bytes"),
    "latin": (b"import torch\nname = '\xff\xfe'\n", "not text in its encoding"),
    "wrong_encoding": (b"# -*- coding: no-such -*-\nimport torch\n", "not text in its encoding"),
    "brackets": (b"import torch\nx = " + b"(" * 3000 + b")" * 3000, "too deeply|too many nested parentheses"),
    "minus": (b"import torch\nx = " + b"-" * 200_000 + b"1\n", "too deeply|too complex"),
    "sum": (b"import torch\nx = " + b"1+" * 100_000 + b"1\n", "too deeply|too complex"),
    "elif": (b"import torch\nif a: pass\n" + b"elif a: pass\n" * 100_000, "too deeply|too complex"),
    "indent": (b"import torch\n  x = 1\n", "syntax error"),
    "tabs": (b"import torch\nif 1:\n\tx = 1\n        y = 2\n", "syntax error"),
    "huge": (b"import torch\n" + b"#" * (MAX_BYTES + 1), "too large"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_file_is_one_line_and_the_rest_is_read(name: str, tmp_path: Path) -> None:
    data, wanted = DAMAGED[name]
    (tmp_path / "damaged.py").write_bytes(data)
    (tmp_path / "good.py").write_text(GOOD)
    report = check_tree(str(tmp_path))
    assert [f.code for f in report.findings] == ["CG101"]
    (line,) = report.facts["unread"]
    assert "\n" not in line
    assert line.startswith(str(tmp_path / "damaged.py"))
    assert any(part in line for part in wanted.split("|")), line
    assert report.facts["unreadable"] == [line]
    assert report.exit_code() == 2, "a gate does not pass on what it could not look at"
    with pytest.raises(CheckError):
        check_tree(str(tmp_path / "damaged.py"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\ufeffimport torch\n",
        "import torch\r\nx = 1\r\n",
        "# torch\n" * 50_000,
        "import torch\nx = " + " + ".join(["1"] * 900) + "\n",
        "import torch\n" + "".join("    " * i + f"if torch.x{i}:\n" for i in range(90)) + "    " * 90 + "pass\n",
        "from . import torch\nfrom .... import torch as t\nfrom torch import *\nimport torch.a.b.c as d\n",
        "import torch\nclass A(A, B[int], torch.nn.Module, *c, metaclass=d):\n    def forward(*a, **kw): return a[0]\n",
        "import torch\nclass A(torch.nn.Module):\n    def forward(x: 'torch.Tensor['): return x.item()\n",
        "import torch\nclass A(torch.nn.Module):\n  forward = lambda self, x: x\n"
        "  def forward(self, x, /, *, y: torch.Tensor | None = None): return [y := 1, *x]\n",
        "import torch\ndef factory():\n    return factory, factory\n",
        "import torch\ndef f():\n    return lambda: 1, lambda i: i\n",
        "import torch\nglobal x\nmatch x:\n    case {'a': [1, *_], **k} if k: pass\n",
        "import torch\nasync def f():\n    async with a as b, c: await b\n    async for i in b: yield i\n",
    ],
)
def test_odd_files_are_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_bytes(text.encode())
    assert check_tree(str(tmp_path)).facts["unread"] == []


def test_deep_forward_is_said_not_fatal(tmp_path: Path) -> None:
    chain = "x" + ".view(4)" * 3000
    (tmp_path / "deep.py").write_text(GOOD.replace("x.item()", chain))
    (tmp_path / "good.py").write_text(GOOD)
    report = check_tree(str(tmp_path))
    assert [f.code for f in report.findings] == ["CG101"]
    assert all("nested too deeply" in line for line in report.facts["unread"])
    assert report.exit_code() == 0, "it was read, but for that"


def test_recursion_limit_is_put_back(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    before = sys.getrecursionlimit()
    check_tree(str(tmp_path))
    assert sys.getrecursionlimit() == before


def test_bad_trees(tmp_path: Path) -> None:
    for path, wanted in ((tmp_path / "none", "no such file or folder"), (tmp_path, "no Python file")):
        with pytest.raises(CheckError, match=wanted):
            check_tree(str(path))
    (tmp_path / "notes.txt").write_text("torch")
    with pytest.raises(CheckError, match="not a Python file"):
        check_tree(str(tmp_path / "notes.txt"))


def test_caches_and_environments_are_left_out(tmp_path: Path) -> None:
    for folder in ("__pycache__", ".venv", "node_modules", "src"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.py").write_text(GOOD)
    report = check_tree(str(tmp_path))
    assert report.facts["files"] == 1
    assert len(report.findings) == 1


def test_declared_encoding_is_honoured(tmp_path: Path) -> None:
    path = tmp_path / "t.py"
    path.write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\r\n".encode("latin-1"))
    assert decode(str(path)) == "# -*- coding: latin-1 -*-\nname = 'é'\n"
    with pytest.raises(Unreadable, match="No such file"):
        parse(str(tmp_path / "none.py"))


def test_module_names(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "a" / "__init__.py").touch()
    (inner / "__init__.py").touch()
    (inner / "c.py").touch()
    root = package_root(str(inner / "c.py"))
    assert root == str(tmp_path)
    assert module_name(str(inner / "c.py"), root) == "a.b.c"
    assert module_name(str(inner / "__init__.py"), root) == "a.b"


def test_torch_itself_is_read_without_an_internal_error() -> None:
    folder = Path(torch.__file__).parent / "nn"
    report = check_tree(str(folder))
    assert report.facts["files"] > 100
    assert report.facts["unread"] == []


def test_own_source_is_read_without_a_finding(repo: Path) -> None:
    report = check_tree(str(repo / "src" / "onegraph"))
    assert report.facts["unread"] == []
    assert [f"{f.path}:{f.line} {f.code} {f.source}" for f in report.findings if f.severity == "error"] == []


def test_transformers_in_thirty_seconds_on_two_cores(tmp_path: Path) -> None:
    """A quarter of its models in a quarter of that; CPU seconds of all processes over two cores, so that the machine's
    other work does not count."""
    transformers = pytest.importorskip("transformers")
    models = sorted(path for path in Path(transformers.__file__).with_name("models").iterdir() if path.is_dir())
    assert len(models) > 300
    for model in models[::4]:
        shutil.copytree(model, tmp_path / model.name)
    program = (
        "import os, sys; from onegraph.check.source import check_tree;"
        "r = check_tree(sys.argv[1], processes=2); assert not r.facts['unread'], r.facts['unread'];"
        "t = os.times(); print(t.user + t.system + t.children_user + t.children_system)"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, tmp_path], check=True, capture_output=True, text=True)
    assert min(float(done.stdout) / 2, time.perf_counter() - started) < 30 / 4
