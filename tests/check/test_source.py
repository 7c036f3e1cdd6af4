"""Source reading: what it must see, and, in as many cases, what it must not."""

from pathlib import Path
from textwrap import dedent, indent

import pytest

from onegraph.check.report import CheckError, Severity
from onegraph.check.source import check_source

HEAD = """\
import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


"""


def step_file(folder: Path, body: str, params: str = "x", inputs: str = "", before: str = "", name: str = "t") -> Path:
    """A target whose step has this body; `before` stands in the factory."""
    inputs = inputs or 'torch.full((4,), float(i), device="cuda"),'
    text = HEAD + "def factory():\n" + indent(dedent(before), "    ") + f"\n    def step({params}):\n"
    text += indent(dedent(body), " " * 8) + f"\n    return step, lambda i: ({inputs})\n"
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def codes(path: Path, factory: str = "factory") -> list[str]:
    report = check_source(str(path), factory)
    assert "source" not in report.facts, report.facts["source"]
    return [f.code for f in report.findings]


FIRES = [
    ("CG101", "return x * int(x.sum())"),
    ("CG101", "return x[: x.argmax()]"),
    ("CG101", "return x.cpu()"),
    ("CG101", "return x.to('cpu')"),
    ("CG101", "y = x.detach().numpy()\nreturn x"),
    ("CG101", "name = f'{x.max():.3f}'\nreturn x"),
    ("CG101", "return x * math.sqrt(x[0])"),
    ("CG101", "for k in range(x.argmax()):\n    x = x + 1\nreturn x"),
    ("CG101", "return torch.zeros(x.argmax(), device=x.device)"),
    ("CG101", "return x.split(x.tolist())"),
    ("CG101", "values = [v.item() for v in x]\nreturn x"),
    ("CG101", "return x if torch.equal(x, x) else -x"),
    ("CG101", "i = x.argmax()\nreturn x[i]"),
    ("CG102", "return x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)"),
    ("CG102", "return x + torch.arange(4).to(x)"),
    ("CG102", "return x + x.new_tensor([1.0])"),
    ("CG102", "return x + torch.ones(4).cuda()"),
    ("CG102", "return x.copy_(torch.ones(4))"),
    ("CG103", "return x[[0, 1]]"),
    ("CG103", "return x[torch.tensor([0, 1])]"),
    ("CG103", "y = x.clone()\ny[0] = 2.0\nreturn y"),
    ("CG104", "return x[x > 0]"),
    ("CG104", "mask = (x > 0) & ~torch.isnan(x)\nreturn x[mask]"),
    ("CG104", "return torch.nonzero(x)"),
    ("CG104", "return x.repeat_interleave(x.long())"),
    ("CG104", "values, counts = torch.unique(x, return_counts=True)\nreturn counts"),
    ("CG104", "return F.one_hot(x.long())"),
    ("CG104", "y = x.clone()\ny[x > 0] = x * 2\nreturn y"),
    ("CG105", "return torch.linalg.solve(x.diag(), x)"),
    ("CG105", "return torch.histc(x)"),
    ("CG105", "return F.ctc_loss(x, x, x, x)"),
    ("CG105", "return torch.normal(x, x)"),
    ("CG106", "torch.cuda.current_stream().synchronize()\nreturn x"),
    ("CG107", "e = torch.cuda.Event()\ne.record()\ne.query()\nreturn x"),
    ("CG108", "if (x > 0).any():\n    x = x * 2\nreturn x"),
    ("CG108", "return x if x.sum() else -x"),
    ("CG108", "assert (x > 0).all()\nreturn x"),
    ("CG108", "while x.sum() < 3:\n    x = x + 1\nreturn x"),
    ("CG108", "ok = (x > 0).all() and True\nreturn x"),
    ("CG108", "return x * (0 < x.sum() < 3)"),
    ("CG302", "torch.manual_seed(0)\nreturn x"),
    ("CG307", "return torch.compile(torch.sin)(x)"),
]


@pytest.mark.parametrize(("code", "body"), FIRES, ids=[f"{c}-{b[:40]!r}" for c, b in FIRES])
def test_fires(code: str, body: str, tmp_path: Path) -> None:
    found = codes(step_file(tmp_path, body))
    assert code in found
    assert set(found) <= {code, "CG201", "CG202"}  # a value read on the host also decides or is baked in


SILENT = [
    "if False or x.dim() == 1 or True:\n    return x\nreturn x.item()",
    "if not torch.cuda.is_current_stream_capturing() and x.isnan().any():\n    raise ValueError('nan')\nreturn x",
    "asked = torch.jit.is_tracing() or torch.cuda.is_current_stream_capturing()\nassert asked or x.any()\nreturn x",
    "return torch.histc(x, bins=4, min=0.0, max=8.0)",
    "return torch.linalg.inv_ex(x.diag()).inverse",
    "return x * int(x.shape[0])",
    "return x * float(len(x))",
    "return x[: x.size(0) // 2]",
    "return x * math.sqrt(x.shape[-1])",
    "return x * max(2, x.dim())",
    "return torch.where(x > 0, x, -x)",
    "return x.masked_fill(x > 0, 0.0)",
    "y = x.clone()\ny[x > 0] = 0.0\nreturn y",
    "y = torch.zeros(4, 2, device=x.device)\ny[0] = 3.0\nreturn y",
    "return x[1:3] + x[None, 0]",
    "return x[x.long()]",
    "return torch.arange(4, device=x.device) + x",
    "return torch.full((4,), 2.0, device=x.device) + x",
    "return x.repeat_interleave(2)",
    "return x.repeat_interleave(x.long(), output_size=8)",
    "return F.one_hot(x.long(), 4)",
    "return x.to(torch.bfloat16).to(x.device)",
    "if x is None:\n    return x.item()\nreturn x",
    "if isinstance(x, float):\n    return float(x)\nreturn x",
    "if torch.jit.is_tracing():\n    print(x.tolist())\nreturn x",
    "if x.dim() == 2:\n    x = x[0]\nreturn x",
    "if x.dtype == torch.float16 and x.is_cuda:\n    x = x.float()\nreturn x",
    "if x.device.type == 'cpu':\n    return x.tolist()\nreturn x",
    "names = ['a', 'b']\nfor name in names:\n    x = x + len(name)\nreturn x",
    "a, b = x.chunk(2)\nreturn torch.cat([a, b])",
    "best = x.max(dim=0)\nreturn best.values + best.indices",
    "raise ValueError(f'{x}')",
    "assert x.shape[0] == 4, f'{x}'\nreturn x",
    "return sum([x, x])",
    "table = {'a': x}\nreturn table['a'] if 'a' in table else x",
]


@pytest.mark.parametrize("body", SILENT, ids=[repr(b[:50]) for b in SILENT])
def test_silent_on_plain_python_and_device_work(body: str, tmp_path: Path) -> None:
    assert codes(step_file(tmp_path, body)) == []


def test_nothing_outside_the_step_is_reported(tmp_path: Path) -> None:
    before = """
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")
        if scale.sum().item() > 3:
            torch.cuda.synchronize()
        helper = lambda t: t.item()
    """
    path = step_file(tmp_path, "return x * scale", before=before)
    path.write_text(path.read_text() + "\n\ndef unrelated(t: torch.Tensor):\n    return t.item()\n")
    assert codes(path) == []


def test_place_is_that_of_the_method_and_calls_lead_there(tmp_path: Path) -> None:
    body = """
        y = (
            x.abs()
            .max()
            .item()
        )
        return x
    """
    (found,) = check_source(str(step_file(tmp_path, body)), "factory").findings
    assert found.source.strip() == ".item()"
    assert found.source[found.column - 1 :] == "item()"
    assert found.severity is Severity.ERROR


def test_followed_across_functions_classes_and_modules(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("from .layers import Block as Layer\n")
    (package / "base.py").write_text(
        HEAD + "class Base(nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.register_buffer('table', torch.zeros(width))\n"
        "    def read(self, t):\n"
        "        return helper(t)\n"
        "def helper(t):\n"
        "    return t.item()\n"
    )
    (package / "layers.py").write_text(
        "import torch\nfrom mine.base import Base\n"
        "class Block(Base):\n"
        "    def __init__(self, width):\n"
        "        super().__init__(width)\n"
        "        self.linear = torch.nn.Linear(width, width)\n"
        "    def forward(self, x):\n"
        "        self.read(self.linear(x))\n"
        "        return self.linear(x) + self.table\n"
    )
    path = tmp_path / "target.py"
    path.write_text(
        "import torch\nimport mine\n\n\ndef factory():\n"
        "    model = mine.Layer(4).to('cuda')\n"
        "    return model, lambda i: (torch.full((4,), float(i), device='cuda'),)\n"
    )
    (found,) = check_source(str(path), "factory").findings
    assert (found.code, found.path) == ("CG101", str(package / "base.py"))
    assert [frame.function for frame in found.calls] == ["Block.forward", "Base.read", "helper"]
    assert found.calls[0].source == "self.read(self.linear(x))"


def test_partials_lambdas_closures_and_dataclasses(tmp_path: Path) -> None:
    before = """
        @dataclass
        class State:
            table: torch.Tensor
            name: str = "n"
        state = State(torch.zeros(4, device="cuda"))
        scaled = functools.partial(lambda t, u: u.item() if t is not None else 0, state.table)
    """
    assert codes(step_file(tmp_path, "scaled(x)\nreturn x", before=before)) == ["CG101"]
    assert codes(step_file(tmp_path, "return x * len(state.name)", before=before)) == []


def test_module_buffers_move_with_the_module_and_plain_tensors_do_not(tmp_path: Path) -> None:
    before = """
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("moved", torch.zeros(4))
                self.left = torch.zeros(4)
            def forward(self, x):
                return x + self.moved.to(x.device) + self.left.to(x.device)
        model = M().to("cuda")
    """
    report = check_source(str(step_file(tmp_path, "return model(x)", before=before)), "factory")
    assert [f.code for f in report.findings] == ["CG102"]
    assert report.findings[0].message.startswith("`self.left.to(x.device)`")


def test_inputs_decide_what_changes(tmp_path: Path) -> None:
    constant = step_file(tmp_path, "return x * n", "x, n", 'torch.ones(4, device="cuda"), 3', name="a")
    changing = step_file(tmp_path, "return x * n", "x, n", 'torch.ones(4, device="cuda"), i', name="b")
    derived = step_file(tmp_path, "k = n // 2\nreturn x[k]", "x, n", 'torch.ones(4, device="cuda"), i', name="c")
    length = step_file(tmp_path, "return x[:n]", "x, n", 'torch.ones(4, device="cuda"), i', name="d")
    branch = step_file(tmp_path, "return x * 2 if n > 3 else x", "x, n", 'torch.ones(4, device="cuda"), i', name="e")
    ragged = step_file(tmp_path, "return x * 2", "x", 'torch.ones(4 + i, device="cuda"),', name="f")
    assert codes(constant) == []
    assert codes(changing) == codes(derived) == ["CG202"]
    assert codes(length) == codes(ragged) == ["CG208"]
    assert codes(branch) == ["CG201"]


STATE = """
    class Step:
        def __init__(self):
            self.state = torch.zeros(4, device="cuda")
            self.cache = None
            self.rows = []
            self.n = 0
        def __call__(self, x):
            {body}
    run = Step()
"""


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("self.state = self.state + x; return self.state * 2", ["CG205"]),
        ("self.state.add_(x); return self.state * 2", []),
        ("self.state = x * 2; return self.state + 1", []),  # written before it is read: nothing is carried over
        ("self.cache = self.cache if self.cache is not None else x * 1; return x + self.cache", []),  # made once
        ("self.n += 1; return x", ["CG210"]),
        ("self.n = 1; return x * self.n", []),
        ("self.n += 1; return x * self.n", ["CG202", "CG210"]),
        ("self.rows.append(x); return x", ["CG210"]),
        ("rows = []; rows.append(x); return torch.stack(rows)", []),
        ("self.state = torch.cat([self.state, x]); return self.state.sum()", ["CG208"]),
        ("self.state = self.state.view(2, 2).view(4); return self.state * 2", []),  # another look, the same storage
    ],
)
def test_state_that_outlives_the_step(body: str, wanted: list[str], tmp_path: Path) -> None:
    lines = "\n            ".join(part.strip() for part in body.split(";"))
    path = step_file(tmp_path, "return run(x)", before=STATE.replace("{body}", lines))
    assert sorted(codes(path)) == wanted


@pytest.mark.parametrize(
    ("between", "wanted"),
    [
        ("layer.weight = nn.Parameter(torch.ones(4, 4, device='cuda'))", ["CG205"]),
        ("layer.weight.data = torch.ones(4, 4, device='cuda')", ["CG205"]),
        ("layer.weight.data.fill_(1.0)", []),
        ("other.weight = nn.Parameter(torch.ones(4, 4, device='cuda'))", []),
        ("mine.table = torch.ones(4, device='cuda')", ["CG205"]),
        ("mine.table.fill_(1.0)", []),
    ],
)
def test_what_the_caller_does_between_steps(between: str, wanted: list[str], tmp_path: Path) -> None:
    before = f"""
        layer, other = nn.Linear(4, 4).to("cuda"), nn.Linear(4, 4).to("cuda")
        class Mine:
            def __init__(self):
                self.table = torch.zeros(4, device="cuda")
        mine = Mine()
        def fresh(i):
            {between}
            return torch.full((4,), float(i), device="cuda")
    """
    assert codes(step_file(tmp_path, "return layer(x) + mine.table", before=before, inputs="fresh(i),")) == wanted


def test_buffers_that_take_turns(tmp_path: Path) -> None:
    before = 'pair = [torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")]'
    inputs = 'torch.ones(4, device="cuda"), i'
    turning = step_file(tmp_path, "return x + pair[n % 2]", "x, n", inputs, before, name="a")
    fixed = step_file(tmp_path, "return x + pair[0] + pair[1]", "x, n", inputs, before, name="b")
    assert codes(turning) == ["CG205"]
    assert codes(fixed) == []


def test_behind_a_condition_is_a_warning(tmp_path: Path) -> None:
    path = step_file(tmp_path, "import os\nif os.environ.get('DEBUG'):\n    x.item()\nreturn x")
    (found,) = check_source(str(path), "factory").findings
    assert (found.code, found.severity) == ("CG101", Severity.WARNING)


def test_recursion_and_unknown_calls_end(tmp_path: Path) -> None:
    before = """
        def down(t, n):
            return down(t * 2, n - 1) if n else t
        def chase(t):
            return mutual(t)
        def mutual(t):
            return chase(t)
    """
    assert (
        codes(step_file(tmp_path, "import somewhere\nsomewhere.f(x)\nreturn down(x, 8) + chase(x)", before=before))
        == []
    )


def test_a_step_that_cannot_be_followed_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.py"
    path.write_text("import other\n\n\ndef factory():\n    return other.build()\n")
    report = check_source(str(path), "factory")
    assert report.findings == ()
    assert "could not be followed" in report.facts["source"]


def test_no_such_factory(tmp_path: Path) -> None:
    path = step_file(tmp_path, "return x")
    with pytest.raises(CheckError, match="no factory 'other'"):
        check_source(str(path), "other")
    with pytest.raises(CheckError, match="no such file"):
        check_source(str(tmp_path / "missing.py"), "factory")
