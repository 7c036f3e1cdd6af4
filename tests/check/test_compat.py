"""The private names of torch: one module has them all, and each does what the checker needs of it."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onegraph.check import compat
from onegraph.check.report import CheckError

CHECK = Path(compat.__file__).parent


def sources() -> list[tuple[Path, ast.Module]]:
    """Every module of the checker but `compat`."""
    return [(p, ast.parse(p.read_text())) for p in sorted(CHECK.rglob("*.py")) if p != Path(compat.__file__)]


def private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names of torch with a private part, as imports and attributes spell them."""
    bound = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            if head in bound:
                yield f"{bound[head]}.{rest}"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch._dynamo as d", ["torch._dynamo"]),
        ("from torch._C import DispatchKey", ["torch._C.DispatchKey"]),
        ("from torch.utils import _pytree as p\np.tree_map", ["torch.utils._pytree", "torch.utils._pytree.tree_map"]),
        ("import torch\ndef f():\n    return torch._C.x", ["torch._C.x", "torch._C"]),
        ("import torch\ntorch.__version__; torch.zeros(1)", []),
    ],
)
def test_the_scan_sees_every_way_to_name_one(code: str, found: list[str]) -> None:
    assert [n for n in private_names(ast.parse(code)) if private(n)] == found


def test_no_other_module_names_one() -> None:
    wrong = {f"{p.relative_to(CHECK)}: {n}" for p, tree in sources() for n in private_names(tree) if private(n)}
    assert wrong == set(), "belongs into check/compat.py"


def test_private_attributes_of_others_are_listed() -> None:
    """`x._name` is our own (some module of the checker makes it), Python's, or a line of ATTRIBUTES; all are used."""
    read, made = {}, set()
    for path, tree in sources():
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=name) if private(name):
                    read[name] = path.name
                    if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):
                        made.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    made.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    made.add(name)
    python = {"_exit", "_getframe", "_replace"}
    triton = {"_implicit_cvt", "_patch_lang"}  # of its interpreter, in simulate/interpret.py
    foreign = set(read) - made - python - triton
    assert foreign <= set(compat.ATTRIBUTES), {name: read[name] for name in foreign}
    assert set(compat.ATTRIBUTES) <= set(read), "nothing reads it any more"


def test_attributes_are_there() -> None:
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).view(1, 2)
    module = torch.nn.Linear(1, 1)
    owners: dict[str, Any] = {
        "_schema": torch.ops.aten.add.Tensor,
        "_cdata": x.untyped_storage(),
        "_base": y,
        "_is_view": y,
        "_version": x,
        "_values": torch.eye(2).to_sparse(),
        "_sequence_nr": y.grad_fn,
        "_input_metadata": y.grad_fn,
        "_call_impl": module,
        "_compiled_call_impl": module,
        "_current_frames": sys,
    }
    for name, owner in owners.items():
        assert hasattr(owner, name), f"torch {torch.__version__}: {type(owner).__name__} has no {name}"
    assert x.untyped_storage()._cdata == x.detach().untyped_storage()._cdata
    assert owners["_schema"]._schema.name == "aten::add"
    assert y._base is not None
    assert y._is_view()
    version = x._version
    with torch.no_grad():
        x.add_(1)
    assert x._version == version + 1
    assert set(compat.ATTRIBUTES) - set(owners) == {"_is_param", "_backend_fns"}  # tested below


def test_kernels_that_python_registered_are_known_and_can_be_called() -> None:
    library = torch.library.Library("onegraph_compat_kernels", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CUDA")
    assert "onegraph_compat_kernels/double/CUDA" in compat.LIBRARY_KERNELS
    func = torch.ops.onegraph_compat_kernels.double.default
    assert func.redispatch(compat.DispatchKeySet(compat.DispatchKey.CUDA), torch.ones(1)) == 2


def test_a_wrapper_with_no_torch_function_is_a_parameter_where_it_says_so() -> None:
    class Claims(torch.Tensor):
        __torch_function__ = compat.no_torch_function_of_its_own

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    made = compat.make_wrapper(Claims, (2, 3), dtype=torch.float32, device="meta", requires_grad=False)
    assert type(made) is Claims
    assert made.shape == (2, 3)
    assert not isinstance(made, torch.nn.Parameter)
    made._is_param = True
    assert isinstance(made, torch.nn.Parameter)


def test_modes_hear_ops_and_can_be_left() -> None:
    heard = []

    class Mode(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Mode():
        x + 1
        with compat.no_modes():
            x * 2
    assert heard == ["aten::add"]


def test_functions_are_not_heard_where_they_must_not_be() -> None:
    heard = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        with compat.no_torch_function():
            torch.ones(1)
        assert heard == []
        torch.ones(1)
    assert heard == [torch.ones]


def test_lifting_is_a_switch() -> None:
    before = compat.only_lifts_cpu_tensors()
    compat.set_only_lift_cpu_tensors(True)
    try:
        assert compat.only_lifts_cpu_tensors() is True
    finally:
        compat.set_only_lift_cpu_tensors(before)


def test_nodes_are_numbered_in_the_order_they_are_made() -> None:
    x = torch.ones(1, requires_grad=True)
    old = (x * 2).grad_fn
    border = compat.next_node_number()
    new = (x * 3).grad_fn
    assert old is not None
    assert new is not None
    assert old._sequence_nr() < border <= new._sequence_nr()


def test_every_backward_pass_goes_through_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    def run(*args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        return compat.run_backward(*args, **kwargs)

    for module in (torch.autograd, torch.autograd.graph):
        assert getattr(module, compat.RUN_BACKWARD) is compat.run_backward
        monkeypatch.setattr(module, compat.RUN_BACKWARD, run)
    x = torch.ones(1, requires_grad=True)
    (x * 2).backward()
    assert torch.autograd.grad(x * 2, x)[0] == 2
    assert len(passes) == 2


def test_custom_ops_show_their_bodies() -> None:
    @torch.library.custom_op("onegraph_compat::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    definition = compat.OPDEFS["onegraph_compat::twice"]
    assert definition._backend_fns[None](torch.ones(1)) == 2


def test_ops_that_take_functions_have_an_eager_form() -> None:
    func = torch.ops.higher_order.cond
    assert isinstance(func, compat.HigherOrderOperator)
    kernel = func.py_kernels[compat.DispatchKey.CompositeExplicitAutograd]
    with compat.no_mode_asked(lambda: None):
        pass
    assert callable(kernel)


def test_a_kernel_that_asks_for_modes_finds_none() -> None:
    space: dict[str, Any] = {"_get_current_dispatch_mode": lambda: "a mode"}
    exec("def kernel(): return _get_current_dispatch_mode()", space)
    with compat.no_mode_asked(space["kernel"]):
        assert space["kernel"]() is None
    assert space["kernel"]() == "a mode"


def twice_of_nothing() -> None:
    """No op: torch has no decomposition of it."""


def test_ops_made_of_others() -> None:
    assert compat.is_composed("aten::where.ScalarSelf")
    assert not compat.is_composed("aten::add.Tensor")
    assert compat.decomposition(torch.ops.aten.silu_backward.default) is not None
    assert compat.decomposition(twice_of_nothing) is None


def test_storages_by_address_and_overlap() -> None:
    x = torch.arange(3.0)
    same = compat.storage_by_address(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()).cdata)
    assert same.data_ptr() == x.data_ptr()
    assert compat.overlaps(torch.ones(1).expand(4)) == 1
    assert compat.overlaps(x) == 0


def test_fakes_compute_shapes_and_refuse_sizes_that_depend_on_values() -> None:
    x = torch.ones(2, 3)
    with compat.fake_mode(None) as mode:
        fake = mode.from_tensor(x)
        assert (fake @ fake.T).shape == (2, 2)
        with pytest.raises(compat.size_depends_on_values()):
            fake.nonzero()


def test_trees_zeros_and_generators() -> None:
    assert compat.tree_map(lambda n: n + 1, [1, {"a": (2,)}]) == [2, {"a": (3,)}]
    assert compat.EFFICIENT_ZERO([2], dtype=torch.float32).shape == (2,)
    assert isinstance(compat.GeneratorBase.__new__(torch.Generator, "cpu"), torch.Generator)


def test_names_that_are_stood_in_for_are_there() -> None:
    assert hasattr(torch.cuda, compat.LAZY_INIT)
    assert hasattr(torch.cuda.nvtx, compat.NVTX)
    assert hasattr(torch.cuda, compat.SLEEP)
    if sys.platform == "linux":
        lib = Path(torch.__file__).parent / "lib" / "libc10.so"
        assert compat.DEVICE_GUARDS.encode() in lib.read_bytes()


def test_calls_of_compiled_functions_are_heard() -> None:
    heard: list[Any] = []
    function = torch.compile(lambda x: x + 1, backend="eager")
    with torch.compiler.set_stance("force_eager"), compat.compiled_calls(heard.append):
        assert function(torch.ones(1)) == 2
    assert heard
    count = len(heard)
    with torch.compiler.set_stance("force_eager"):
        function(torch.ones(1))
    assert len(heard) == count


@pytest.mark.gpu
def test_capture_is_known_to_c() -> None:
    assert compat.capturing() is False


def test_a_torch_without_a_name_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_debug_has_internal_overlap")
    with pytest.raises(CheckError, match=r"^torch .* has not got .*_debug_has_internal_overlap.*2\.11") as caught:
        exec(compile(Path(compat.__file__).read_text(), compat.__file__, "exec"), {"__name__": "again"})
    assert "\n" not in str(caught.value)
