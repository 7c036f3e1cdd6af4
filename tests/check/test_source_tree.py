"""Reading a tree of files, where nobody names a step: what looks like one."""

from pathlib import Path

from test_source import HEAD, step_file

from onegraph.check.source import check_tree


def test_a_project_finds_its_own_package_below_src(tmp_path: Path) -> None:
    """Not installed, as in the environment of a pre-commit hook, and from a folder beside it."""
    for folder, marker in (("marked", True), ("bare", False)):
        root = tmp_path / folder
        (root / "src" / "own").mkdir(parents=True)
        (root / "tests").mkdir()
        if marker:
            (root / "pyproject.toml").write_text("")
        (root / "src" / "own" / "__init__.py").write_text("def total(x):\n    return x.sum().item()\n")
        for place in (root, root / "tests"):
            (place / "steps.py").write_text(
                HEAD + "from own import total\ndef f():\n    return (lambda x: x + total(x)), lambda i: (torch.ones(4, "
                "device='cuda'),)\n"
            )
            found = {(f.code, Path(f.path).name) for f in check_tree(str(place / "steps.py")).findings}
            assert (("CG101", "__init__.py") in found) == marker


def test_tree_reads_forwards_captures_and_factories(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        HEAD + "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Linear(4, 4)\n"
        "    def forward(self, x, sizes, flag: bool = False, n: int = 3):\n"
        "        y = self.linear(x.view(-1))\n"
        "        if flag or n > 2 or len(sizes) > 3 or sizes[0] > 1:\n"
        "            y = y * int(n)\n"
        "        return y.tolist()\n"
        "class Plain:\n"
        "    def forward(self, x: torch.Tensor):\n"
        "        return x.item()\n"
        "def train(loss: torch.Tensor):\n"
        "    return loss.item()\n"
    )
    (tmp_path / "capture.py").write_text(
        HEAD + "def capture(step):\n"
        "    x = torch.zeros(4, device='cuda')\n"
        "    x.sum().item()\n"
        "    graph = torch.cuda.CUDAGraph()\n"
        "    with torch.cuda.graph(graph):\n"
        "        y = x * 2\n"
        "        y.sum().item()\n"
        "    return graph, y.tolist()\n"
    )
    step_file(tmp_path, "return x.tolist()", name="target")
    found = check_tree(str(tmp_path)).findings
    places = {(Path(f.path).name, f.source.strip(), f.severity.value) for f in found}
    assert places == {
        ("model.py", "return y.tolist()", "warning"),
        ("capture.py", "y.sum().item()", "error"),
        ("target.py", "return x.tolist()", "error"),
    }


def test_capture_on_a_second_gpu_without_a_stream(tmp_path: Path) -> None:
    (tmp_path / "capture.py").write_text(
        HEAD + "def wrong(step, x):\n"
        "    torch.cuda.set_device('cuda:1')\n"
        "    with torch.cuda.graph(torch.cuda.CUDAGraph()):\n"
        "        y = step(x)\n"
        "    return y\n"
        "def right(step, x):\n"
        "    torch.cuda.set_device('cuda:1')\n"
        "    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream('cuda:1')):\n"
        "        y = step(x)\n"
        "    return y\n"
        "def default(step, x):\n"
        "    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.default_stream()):\n"
        "        return step(x)\n"
    )
    assert [(f.code, f.line) for f in check_tree(str(tmp_path)).findings] == [("CG303", 12), ("CG304", 21)]


def test_tree_finds_the_same_with_several_processes(tmp_path: Path) -> None:
    for i in range(70):
        step_file(tmp_path, f"return x.tolist() if {i} % 2 else x", name=f"t{i:02}")
    one = check_tree(str(tmp_path), processes=1)
    several = check_tree(str(tmp_path), processes=2)
    assert [(f.path, f.line, f.code) for f in one.findings] == [(f.path, f.line, f.code) for f in several.findings]
    assert len(one.findings) == 35
