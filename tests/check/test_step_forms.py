"""Steps in the forms that users have: whatever wraps the tensors that a step takes and returns, they are followed."""

import argparse
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from onegraph.check import CheckError, check_step, cli, containers
from onegraph.check.source import check_source


def ones(i: float) -> torch.Tensor:
    return torch.full((4,), float(i), device="cuda")


def codes(factory: Callable[[], Any], **options: Any) -> set[tuple[str, str]]:
    return {(f.code, f.severity.value) for f in check_step(factory, **options).findings}


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Out:
    logits: Any
    hidden: Any = None


@dataclass(frozen=True)
class Frozen:
    tensor: Any
    number: int = 0


class Plain:
    def __init__(self, tensor: Any, number: int = 0) -> None:
        self.tensor, self.number = tensor, number


class Slotted:
    __slots__ = ("number", "tensor")

    def __init__(self, tensor: Any, number: int = 0) -> None:
        self.tensor, self.number = tensor, number


def model_output(tensor: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(logits=tensor, hidden_states=(tensor + 1, tensor))


RESULTS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda t: {"a": t, "b": None, "n": 3},
    "nested": lambda t: [{"a": (t, [t + 1])}, None, {"deep": deque([{"er": t}])}],
    "dataclass": Out,
    "dataclass in a dataclass": lambda t: Out(Out(t), [t]),
    "frozen dataclass": Frozen,
    "named tuple": lambda t: Pair(t, Pair(t + 1, None)),
    "ordered dict": lambda t: OrderedDict(x=t),
    "user dict": lambda t: UserDict(x=t),
    "object": Plain,
    "slots": Slotted,
    "namespace": lambda t: SimpleNamespace(t=t),
    "model output": model_output,
    "max": lambda t: t[None].max(0),
}


@pytest.mark.parametrize("form", RESULTS)
def test_results_of_every_form_are_compared(form: str) -> None:
    wrap = RESULTS[form]

    def good() -> Any:
        return (lambda x: wrap(x * 2)), lambda i: (ones(i),)

    def stale() -> Any:
        seen = [0]

        def step(x: torch.Tensor) -> Any:
            seen[0] += 1
            return wrap(x * seen[0])

        return step, lambda i: (ones(i + 1),)

    assert codes(good) == set()
    assert ("CG202", "error") in codes(stale)


def test_a_step_that_returns_nothing_is_judged_by_what_it_writes() -> None:
    def into(scale: Callable[[list[int]], int]) -> Callable[[], Any]:
        def factory() -> Any:
            out, seen = torch.zeros(4, device="cuda"), [1]

            def step(x: torch.Tensor) -> None:
                seen.append(1)
                out.copy_(x * scale(seen))

            return step, lambda i: (ones(i + 1),)

        return factory

    assert codes(into(lambda seen: 2)) == {("CG210", "warning")}
    assert ("CG202", "error") in codes(into(len))


def test_what_a_step_leaves_in_the_buffer_it_is_given_is_compared() -> None:
    def into(factor: Callable[[int], int]) -> Callable[[], Any]:
        def factory() -> Any:
            seen = [0]

            def step(x: torch.Tensor, out: torch.Tensor) -> None:
                seen[0] += 1
                torch.mul(x, factor(seen[0]), out=out)

            return step, lambda i: (ones(i + 1), torch.empty(4, device="cuda"))

        return factory

    assert ("CG202", "error") in codes(into(lambda n: n))
    assert codes(into(lambda n: 3)) == {("CG210", "warning")}


def test_a_number_that_the_step_returns_is_frozen() -> None:
    def returns(result: Callable[[Any, int], Any]) -> Callable[[], Any]:
        def factory() -> Any:
            seen = [0]

            def step(x: torch.Tensor) -> Any:
                seen[0] += 1
                return result(x * 2, seen[0])

            return step, lambda i: (ones(i),)

        return factory

    assert ("CG210", "error") in codes(returns(lambda t, n: (t, n)))
    assert ("CG210", "error") in codes(returns(lambda t, n: Out(t, {"count": n})))
    assert ("CG210", "error") not in codes(returns(lambda t, n: (t, 3, "text", None)))
    assert ("CG210", "error") not in codes(returns(lambda t, n: Plain(t, n)))  # state that is handed out


INPUTS: dict[str, tuple[Callable[[Any, int], Any], Callable[[Any], tuple[Any, int]]]] = {
    "dict": (lambda t, n: {"t": t, "n": n}, lambda b: (b["t"], b["n"])),
    "nested": (lambda t, n: [{"t": (t,)}, [n]], lambda b: (b[0]["t"][0], b[1][0])),
    "dataclass": (Out, lambda b: (b.logits, b.hidden)),
    "frozen dataclass": (Frozen, lambda b: (b.tensor, b.number)),
    "named tuple": (Pair, lambda b: (b.left, b.right)),
    "namespace": (lambda t, n: SimpleNamespace(t=t, n=n), lambda b: (b.t, b.n)),
    "user dict": (lambda t, n: UserDict(t=t, n=n), lambda b: (b["t"], b["n"])),
}


@pytest.mark.parametrize("form", INPUTS)
def test_tensors_in_an_input_are_inputs_and_numbers_are_not(form: str) -> None:
    wrap, open_ = INPUTS[form]

    def takes(number: Callable[[int], int]) -> Callable[[], Any]:
        def step(batch: Any) -> torch.Tensor:
            tensor, factor = open_(batch)
            return tensor * factor

        return lambda: (step, lambda i: (wrap(ones(i + 1), number(i)),))

    assert codes(takes(lambda i: 3)) == set()
    assert codes(takes(lambda i: i + 2)) == {("CG202", "error")}


def test_keywords() -> None:
    def factory() -> Any:
        return (lambda x, *, y: x * y), lambda i: {"x": ones(i), "y": ones(2 * i)}

    assert codes(factory) == set()
    for made in (3, "text", torch.ones(2)):
        with pytest.raises(CheckError, match=r"inputs\(0\): got .*, allowed a tuple or a dict"):
            check_step(lambda made=made: ((lambda x: x), lambda i: made))  # type: ignore[misc]


@pytest.mark.parametrize("kind", [Plain, Out])
def test_an_object_that_stays_the_same_is_state_and_no_input(kind: type) -> None:
    name = "tensor" if kind is Plain else "logits"

    def same(fill: Callable[[Any, int], Any]) -> Callable[[], Any]:
        def factory() -> Any:
            batch = kind(ones(1))

            def inputs(i: int) -> Any:
                fill(batch, i)
                return (batch,)

            return (lambda b: getattr(b, name) * 2), inputs

        return factory

    assert codes(same(lambda b, i: getattr(b, name).fill_(i))) == set()
    assert {c for c, _ in codes(same(lambda b, i: setattr(b, name, ones(i))))} & {"CG205", "CG206"}


@pytest.mark.parametrize("kind", [Plain, Slotted])
def test_nobody_copies_from_an_object_that_is_no_record(kind: type) -> None:
    def step(batch: Any) -> torch.Tensor:
        return batch.tensor * batch.number

    (finding,) = check_step(lambda: (step, lambda i: (kind(ones(i + 1), 3),))).findings
    assert finding.code == "CG205"
    assert finding.message.startswith("inputs(i)[0].tensor, in an object that nobody copies tensors from,")


def test_a_cache_that_is_an_input_every_time_is_compared_as_state() -> None:
    def factory() -> Any:
        cache, seen = torch.zeros(8, device="cuda"), [0]

        def step(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            cache[seen[0] : seen[0] + 1] = x[:1]
            seen[0] += 1
            return x * 2

        return step, lambda i: (ones(i + 1), cache)

    assert ("CG202", "error") in codes(factory)


SOURCE = """
import torch
from dataclasses import dataclass

@dataclass
class Batch:
    x: torch.Tensor
    n: int

def keywords():
    def step(x, n):
        return {"y": x * x.sum().item()}
    return step, lambda i: {"x": torch.ones(4, device="cuda") * i, "n": 3}

def fresh():
    def step(b):
        return b.x * 2
    return step, lambda i: (Batch(torch.ones(4, device="cuda") * i, 1),)

class Object:
    def __init__(self, x):
        self.x = x

def plain():
    def step(b):
        return b.x * 2
    return step, lambda i: (Object(torch.ones(4, device="cuda") * i),)

def rebound():
    batch = Batch(torch.ones(4, device="cuda"), 1)
    def step(b):
        return b.x * 2
    def inputs(i):
        batch.x = torch.ones(4, device="cuda") * i
        return (batch,)
    return step, inputs
"""


def test_reading_takes_the_same_forms(tmp_path: Path) -> None:
    path = tmp_path / "forms.py"
    path.write_text(SOURCE)
    assert [f.code for f in check_source(str(path), "keywords").findings] == ["CG101"]
    assert check_source(str(path), "fresh").findings == ()
    assert [f.code for f in check_source(str(path), "plain").findings] == ["CG205"]
    assert [f.code for f in check_source(str(path), "rebound").findings] == ["CG205"]


def test_leaves_and_mapped() -> None:
    shared = torch.ones(2)
    tree = ({"a": [shared, 1]}, Out(Frozen(shared, 2), Slotted(torch.zeros(1))))
    assert list(containers.leaves(tree)) == [
        "[0]['a'][0]",
        "[0]['a'][1]",
        "[1].logits.tensor",
        "[1].logits.number",
        "[1].hidden.number",
        "[1].hidden.tensor",
    ]
    made = containers.mapped(tree, lambda t: t + 1)
    assert made[0]["a"][0] is made[1].logits.tensor
    assert made[1].hidden.tensor.item() == 1
    assert tree[1].hidden.tensor.item() == 0
    untouched = (Out(3), [1, {"x": 2}])
    assert containers.mapped(untouched, lambda t: t) is untouched
    assert list(containers.tensors(tree, [tree[1]])) == ["[0]['a'][0]"]


def test_rings_and_endless_objects_end() -> None:
    ring: list[Any] = [torch.ones(1)]
    ring.append(ring)
    assert list(containers.tensors(ring)) == ["[0]"]
    assert containers.mapped(ring, lambda t: t * 2)[0].item() == 2

    @dataclass
    class Node:
        tensor: Any
        next: Any = field(default=None)

    first = Node(torch.ones(1))
    first.next = Node(torch.ones(1), first)
    assert list(containers.tensors(first)) == [".tensor", ".next.tensor"]
    chain = None
    for _ in range(500):
        chain = Node(torch.ones(1), chain)
    assert 1 < len(containers.tensors(chain)) < 500


LIBRARY = """
import torch

lib = torch.library.Library("og_forms", "DEF")
lib.define("twice(Tensor x) -> Tensor")
lib.define("into(Tensor x, Tensor(a!) out) -> ()")
lib.define("some(Tensor x) -> Tensor")
torch.library.register_fake("og_forms::twice", torch.empty_like)
torch.library.register_fake("og_forms::into", lambda x, out: None)
torch.library.register_fake("og_forms::some", lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))

def X(i):
    return torch.full((4,), float(i), device="cuda")

def functional():
    return (lambda x: torch.ops.og_forms.twice(x) + 1), lambda i: (X(i),)

def mutating():
    out = X(0)
    def step(x):
        torch.ops.og_forms.into(x, out)
        return out + 1
    return step, lambda i: (X(i),)

def sized():
    return (lambda x: torch.ops.og_forms.some(x) + 1), lambda i: (X(i),)
"""


def run(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers(dest="command"))
    args = parser.parse_args([str(a) for a in argv])
    return int(args.run(args))


def test_ops_with_a_fake_alone_in_a_file_named_many_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "og_forms_library.py"
    path.write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert run("check", f"{path}:functional", f"{path}:functional", path, tmp_path, f"{path}:mutating") == 0
    assert "unverified (2 unverified)" in capsys.readouterr().out
    assert run("check", f"{path}:sized", "og_forms_library:functional") == 1  # by its path, then as a module
    assert "CG104 error" in capsys.readouterr().out
    path.write_text(LIBRARY.replace("og_forms", "og_forms2").replace("+ 1", "* x.sum().item()"))
    assert run("check", f"{path}:functional") == 1  # what it holds now counts


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    from onegraph.check.targets import load

    for folder, number in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "steps.py").write_text(f"class C: pass\ndef f(): return {number}, C\n")
    first, second = (load(f"{tmp_path / folder}/steps.py:f").factory() for folder in ("a", "b"))
    assert (first[0], second[0]) == (1, 2)
    assert first[1].__module__ != second[1].__module__


def test_a_file_that_failed_to_import_is_run_again(tmp_path: Path) -> None:
    from onegraph.check.targets import load

    path = tmp_path / "twice.py"
    path.write_text("import pathlib\npathlib.Path(__file__ + '.ran').touch(exist_ok=False)\ndef f(): pass\n")
    (tmp_path / "twice.py.ran").touch()
    with pytest.raises(CheckError, match="importing it raised FileExistsError"):
        load(f"{path}:f")
    (tmp_path / "twice.py.ran").unlink()
    assert callable(load(f"{path}:f").factory)
