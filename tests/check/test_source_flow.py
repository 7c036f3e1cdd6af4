"""Source reading of what Python does around a step: loops, context managers, decorators, containers, first uses."""

from pathlib import Path

import pytest
from test_source import step_file

from onegraph.check.report import Severity
from onegraph.check.source import check_source

TIMER = """
    from contextlib import contextmanager
    class Timer:
        def __enter__(self):
            return self
        def __exit__(self, *error):
            torch.cuda.synchronize()
    class Depth:
        value = 0
        @contextmanager
        def fresh(self):
            saved, self.value = self.value, 0
            try:
                yield self
            finally:
                self.value = saved
    depth = Depth()
    depth.value = 0
    @dataclass
    class Meta:
        starts: torch.Tensor
        cached: object = field(default=None)
        @property
        def lengths(self):
            if self.cached is None:
                self.cached = torch.diff(self.starts).tolist()
            return self.cached
    class Layer(nn.Module):
        def forward(self, t):
            return t * int(t.sum())
    class Keep:
        last = None
    keep = Keep()
    keep.last = None
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.v = 0.0
        def reset(self):
            self.v = 0.0
        def forward(self, t):
            if isinstance(self.v, float):
                self.v = torch.full_like(t, self.v)
            self.v = self.v + t
            return self.v
    def logged(function):
        def wrapper(t):
            print(t)
            return function(t)
        return wrapper
    @logged
    def double(t):
        return t * 2
    layers, cells = nn.Sequential(Layer(), nn.ReLU()), nn.Sequential(Cell(), nn.ReLU())
    pinned = torch.tensor([1.0, 2.0, 3.0, 4.0], pin_memory=True)
    count = [0]
"""

CASES = {
    "a context manager's exit is read": ("with Timer():\n    y = x * 2\nreturn y", {("CG106", 1)}),
    "what one puts back does not change": (
        "with depth.fresh() as d:\n    d.value += 1\n    y = x.roll(d.value, 0)\nreturn y", set()
    ),
    "a module in a Sequential is followed": ("return layers(x)", {("CG101", 1)}),
    "modules are reset one by one": (
        "for m in cells.modules():\n    if hasattr(m, 'reset'):\n        m.reset()\nreturn cells(x)", set()
    ),
    "a decorator's wrapper runs": ("return double(x)", {("CG101", 1)}),
    "a number read from the device is the cause": (
        "n = max(float(x.sum()), 1.0)\nreturn torch.full((4,), n, device=x.device)", {("CG101", 1)}
    ),
    "a field's default is known, and a property runs once": ("return x.split(Meta(x).lengths)", {("CG101", 1)}),
    "pinned torch.tensor is pinned": ("return x + pinned.to('cuda', non_blocking=True)", set()),
    "what the last step left is told at its first use": (
        "before = keep.last\nkeep.last = x * 2\nif before is None:\n    return x\nreturn x + before", {("CG205", 5)}
    ),
    "rounds that change are the cause, not their numbers": (
        "count[0] += 1\nfor k in range(count[0]):\n    x = x + x[k]\nreturn x", {("CG201", 2)}
    ),
    "zip is as long as its shortest": (
        "count[0] += 1\nfor a, b in zip([count[0] * 0.5] * 3 + [1.0], x.unbind()):\n    x = x + b\nreturn x", set()
    ),
    "topk gives integers": ("x[x.topk(2).indices] = 0.0\nreturn x", {("CG103", 1)}),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_errors_stand_at_their_cause(what: str, tmp_path: Path) -> None:
    body, expected = CASES[what]
    path = step_file(tmp_path, body, before="from dataclasses import field\n" + TIMER.replace("\n    ", "\n"))
    first = path.read_text().splitlines().index("    def step(x):") + 1
    report = check_source(str(path), "factory")
    assert "source" not in report.facts, report.facts["source"]
    found = [f for f in report.findings if f.severity is Severity.ERROR]
    inside = {(f.code, f.calls[0].line - first) for f in found}
    assert inside == expected
