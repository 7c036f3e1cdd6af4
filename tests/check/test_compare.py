"""How the captured step is compared with a later one, on records written by hand: one difference at a time."""

import pytest
import torch

from onegraph.check.report import Severity
from onegraph.check.simulate import frames
from onegraph.check.simulate.compare import StorageTable, differences, traced
from onegraph.check.simulate.records import Argument, OpRecord, Step
from onegraph.check.simulate.replay import Verdict


def here():
    pass


def there():
    pass


HERE, THERE = (((function.__code__, 0),) for function in (here, there))


def op(name="mul", *, chain=HERE, **fields):
    fields = {"kind": "op", "scalars": (), "shapes": ((2,),), "externals": (-1,), "out_shapes": ((2,),)} | fields
    return OpRecord(func=name, name=f"aten.{name}.Tensor", chain=chain, **fields)


def compared(ours, theirs, *, verdict=None, books=None, refreshed=(), ahead=0, captured=(), later=()):
    """The findings of one op, `ahead` equal ones before it; `captured` and `later` are fields of the two steps."""
    steps = [Step(i, ops=[*[op()] * ahead, o], **dict(f)) for i, o, f in ((1, ours, captured), (3, theirs, later))]
    books = books or StorageTable({}, set(), {}, {})
    found, branches = differences(steps[0], steps[1:], {3: verdict} if verdict else {}, books, {3: set(refreshed)})
    assert branches == []
    return found


def only(*args, **kwargs):
    (found,) = compared(*args, **kwargs)
    assert (found.step, found.chain) == (3, HERE)
    return found


def test_what_is_equal_is_no_finding():
    assert compared(op(scalars=(1, "x")), op(scalars=(1, "x")), ahead=3) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "code", "message", "values"),
    [
        (
            {"shapes": ((2,),)},
            {"shapes": ((2,), (2,))},
            *("CG208", "the number of tensors changes", ("step 1: 1 tensors", "step 3: 2 tensors")),
        ),
        (
            {"shapes": ((2,), (2, 3)), "externals": (-1, 5), "derived": (False, False)},
            {"shapes": ((9,), (4, 3)), "externals": (-1, 5), "scalars": (1,)},
            *("CG208", "table has another shape", ("step 1: [2, 3]", "step 3: [4, 3]")),
        ),
        (
            {"shapes": ((2, 3),), "externals": (6,), "derived": (False,)},
            {"shapes": ((4, 3),), "externals": (6,)},
            *("CG208", "a tensor from outside of the graph has another shape", ("step 1: [2, 3]", "step 3: [4, 3]")),
        ),
        (
            {"scalars": (1, 5, 7)},
            {"scalars": (1, 6, 8)},
            *("CG202", "a Python number is baked into mul.Tensor", ("step 1: 5", "step 3: 6")),
        ),
        (
            {"scalars": (1,)},
            {"scalars": (1, 2)},
            *("CG202", "a Python number is baked into mul.Tensor", ("step 1: (1,)", "step 3: (1, 2)")),
        ),
        (
            {"scalars": ("x" * 58,)},
            {"scalars": ("y" * 59,)},
            *("CG202", "a Python number is baked into mul.Tensor"),
            (f"step 1: '{'x' * 58}'", f"step 3: '{'y' * 56}..."),
        ),
        (
            {"scalars": (("cpu", 0.5),)},
            {"scalars": (("cpu", 0.25),)},
            *("CG203", "a CPU scalar tensor is passed by value", ("step 1: 0.5", "step 3: 0.25")),
        ),
        (
            {"scalars": (Argument("grid", (4, 1)),)},
            {"scalars": (Argument("grid", (8, 1)),)},
            *("CG202", "the grid of kernel mul.Tensor changes: it is baked into the launch"),
            ("step 1: (4, 1)", "step 3: (8, 1)"),
        ),
        (
            {"scalars": (Argument("n", 4), Argument("grid", (4, 1)))},
            {"scalars": (Argument("n", 5), Argument("grid", (4, 1)))},
            *("CG202", "argument n of kernel mul.Tensor changes: it is baked into the launch"),
            ("step 1: 4", "step 3: 5"),
        ),
        (
            {"kind": "h2d", "contents": torch.tensor([1, 2])},
            {"kind": "h2d", "contents": torch.tensor([1, 3])},
            *("CG204", "what the host copies to the device changes", ("step 1: [1, 2]", "step 3: [1, 3]")),
        ),
        (
            {"kind": "h2d", "contents": torch.tensor([1]), "codes": ("CG102",)},
            {"kind": "h2d", "contents": torch.tensor([2])},
            *("CG102", "", ("step 1: [1]", "step 3: [2]")),
        ),
        (
            {"kind": "h2d", "contents": torch.tensor([1]), "codes": ("CG103",)},
            {"kind": "h2d", "contents": torch.tensor([2])},
            *("CG103", "", ("step 1: [1]", "step 3: [2]")),
        ),
        (
            {"out_shapes": ((2,),)},
            {"out_shapes": ((3,),)},
            *("CG208", "the result has another shape", ("step 1: ((2,),)", "step 3: ((3,),)")),
        ),
    ],
)
def test_a_difference_has_a_code_a_message_and_both_values(ours, theirs, code, message, values):
    found = only(op(**ours), op(**theirs), books=StorageTable({5: "table"}, {5, 6}, {}, {}))
    assert (found.code, found.message, found.values) == (code, message, values)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"shapes": ((2,),)}, {"shapes": ((3,),)}),  # made in the step: reported where it was made
        ({"shapes": ((2,),), "externals": (5,), "derived": (True,)}, {"shapes": ((3,),), "externals": (5,)}),
        ({"kind": "h2d", "contents": torch.tensor([1])}, {"kind": "h2d", "contents": torch.tensor([1])}),
        ({"kind": "h2d", "contents": None}, {"kind": "h2d", "contents": torch.tensor([1])}),
        ({"kind": "h2d", "contents": torch.tensor([1])}, {"kind": "h2d", "contents": None}),
        ({"out_shapes": ((2,),), "codes": ("CG104",)}, {"out_shapes": ((3,),)}),
        ({"externals": (-1,)}, {"externals": (6,)}),
    ],
)
def test_what_follows_from_something_else_is_no_finding(ours, theirs):
    assert compared(op(**ours), op(**theirs)) == []


@pytest.mark.parametrize(
    ("mine", "other", "told"),
    [
        ((3, 6), (6, 10), True),  # a slice's bounds
        ((8,), (12,), False),  # the size itself
        ((9,), (13,), False),  # and one
        ((12,), (8,), False),  # what is left of 20
        ((4,), (6,), False),  # half of it
        ((0.5,), (0.75,), False),
        ((0.5,), (0.6,), True),
    ],
)
def test_a_number_beside_a_changed_shape_is_told_where_it_is_no_size_of_it(mine, other, told):
    ours, theirs = op(shapes=((8, 2),), scalars=mine), op(shapes=((12, 2),), scalars=other)
    assert [found.code for found in compared(ours, theirs)] == ["CG202"] * told


def test_a_number_that_a_launch_names_is_told_beside_a_shape_that_changed_before_it():
    ours, theirs = ({"shapes": ((n,),), "scalars": (Argument("n", n), Argument("grid", (n,)))} for n in (2, 3))
    (found,) = compared(op(**ours), op(**theirs))
    assert (found.code, found.values, found.note) == ("CG202", ("step 1: 2", "step 3: 3"), (2, 3))
    outside = {"externals": (5,), "derived": (False,)}
    (found,) = compared(op(**ours, **outside), op(**theirs, **outside))
    assert found.code == "CG208"


def test_a_copy_that_the_caller_makes_anew_for_each_replay_is_none():
    pair = [op(kind="h2d", contents=torch.tensor([n])) for n in (1, 2)]
    assert compared(*pair, ahead=2, refreshed=[2]) == []
    assert only(*pair, ahead=2, refreshed=[1]).position == 2


@pytest.mark.parametrize(
    ("ours", "theirs", "pair"),
    [
        ({"scalars": (1, 5, 7)}, {"scalars": (1, 6, 8)}, (5, 6)),
        ({"scalars": (("cpu", 0.5),)}, {"scalars": (("cpu", 0.25),)}, (0.5, 0.25)),
        ({"scalars": (Argument("grid", (4, 1)),)}, {"scalars": (Argument("grid", (4, 2)),)}, (1, 2)),
        ({"scalars": ((3, 4),)}, {"scalars": ((3, 5),)}, (4, 5)),
        ({"scalars": (1,)}, {"scalars": (1, 2)}, None),
        ({"kind": "h2d", "contents": torch.tensor([1, 2])}, {"kind": "h2d", "contents": torch.tensor([1, 3])}, (2, 3)),
        ({"kind": "h2d", "contents": torch.zeros(2)}, {"kind": "h2d", "contents": torch.zeros(3)}, None),
    ],
)
def test_the_pair_of_numbers_that_changed_is_kept(ours, theirs, pair):
    assert only(op(**ours), op(**theirs)).note == pair


MADE = {4: ("step", 0), 5: ("build", -1), 6: ("step", 2), 7: ("inputs", 2), 8: ("outside", -1)}
BUILT = "5 (cache), made by the factory"


@pytest.mark.parametrize(
    ("ours", "theirs", "alive", "code", "message", "values"),
    [
        (
            5,
            6,
            {5},
            "CG205",
            "cache is another storage in each step",
            ("5 (cache), made by the factory", "6, made in step 2"),
        ),
        (5, 7, {5}, "CG205", "cache is another storage in each step", (BUILT, "7, made in inputs 2")),
        (5, 6, {6}, "CG205", "cache is another storage in each step and the captured one is freed", None),
        (8, 6, {8}, "CG205", "a tensor that lives across steps is another storage in each step", None),
        (8, 6, set(), "CG206", "a tensor from outside of the graph is freed before the replay", None),
        (9, 6, set(), "CG206", "a tensor from outside of the graph is freed before the replay", None),
        (6, 5, {5}, "CG205", "cache is another storage in each step and the captured one is freed", None),
        (4, 6, {6}, "CG209", "an output of an earlier step is read after the next replay has overwritten it", None),
    ],
)
def test_another_storage_is_told_by_where_it_came_from(ours, theirs, alive, code, message, values):
    books = StorageTable({5: "cache"}, alive, MADE, {4: 0, 8: 0})
    found = only(op(externals=(3, ours)), op(externals=(3, theirs)), books=books)
    assert (found.code, found.message) == (code, message)
    for told, want, step in zip(found.values, values or (), (1, 3), strict=False):
        assert told == f"step {step}: storage {want}"


def test_a_storage_made_in_the_step_where_the_captured_one_was_not():
    ours, theirs = op(externals=(5,)), op(externals=(-1,))
    assert only(ours, theirs).values[1] == "step 3: made in the step"


def test_inputs_are_compared_by_their_place():
    pair = op(externals=(5,)), op(externals=(6,))
    assert compared(*pair, captured={"inputs": {5: 0}}, later={"inputs": {6: 0}}) == []
    assert only(*pair, captured={"inputs": {5: 0}}, later={"inputs": {6: 1}}).code == "CG206"
    assert only(*pair, captured={"inputs": {5: 0}}, later={"inputs": {}}).code == "CG206"


WRONG, RIGHT = Verdict(3, outputs=(0,)), Verdict(3)
WRONG_ELSEWHERE = Verdict(3, state=(1,), equal_ops={0})


@pytest.mark.parametrize(
    ("kind", "writes", "verdict", "severity"),
    [
        ("op", (), None, Severity.WARNING),
        ("launch", (), None, Severity.ERROR),
        ("op", (), RIGHT, Severity.WARNING),
        ("launch", (), RIGHT, Severity.ERROR),
        ("op", (), WRONG, Severity.ERROR),
        ("op", (), Verdict(3, failed="it raised"), Severity.ERROR),
        ("op", (), WRONG_ELSEWHERE, Severity.WARNING),
        ("op", (0,), WRONG_ELSEWHERE, Severity.ERROR),
        ("view", (), WRONG_ELSEWHERE, Severity.ERROR),
        ("launch", (), WRONG_ELSEWHERE, Severity.ERROR),
    ],
)
def test_an_error_is_what_a_replay_showed_to_be_wrong(kind, writes, verdict, severity):
    ours, theirs = (op(kind=kind, writes=writes, scalars=(n,)) for n in (1, 2))
    assert only(ours, theirs, verdict=verdict).severity is severity


@pytest.mark.parametrize(("ahead", "follows"), [(0, False), (1, True), (2, True)])
def test_what_comes_after_another_read_on_another_path_follows_from_it(ahead, follows):
    reads = [{"reads": [(THERE, 1, 0), (THERE, value, 1)], "parted": True} for value in (7, 8)]
    pair = op(scalars=(1,)), op(scalars=(2,))
    found = only(*pair, ahead=ahead, verdict=WRONG, captured=reads[0], later=reads[1])
    line = there.__code__.co_firstlineno
    assert found.severity is (Severity.WARNING if follows else Severity.ERROR)
    assert (
        f"; it follows from the device value read at tests/check/test_compare.py:{line}" in found.message
    ) is follows
    same_path = only(*pair, ahead=ahead, verdict=WRONG, captured=reads[0], later=reads[1] | {"parted": False})
    assert same_path.severity is Severity.ERROR


def place(chain):
    return frames.CodeLocation("/a/b.py", 7, 0, " n = x.item()  ") if chain is THERE else None


@pytest.mark.parametrize(
    ("reads", "numbers", "told"),
    [
        ([[(THERE, 5, 0)], [(THERE, 7, 0)]], (5, 7), True),
        ([[(THERE, 4, 0)], [(THERE, 6, 0)]], (5, 7), True),
        ([[(THERE, 4, 0)], [(THERE, 5, 0)]], (5, 7), False),
        ([[(HERE, 4, 0), (THERE, 5, 0)], [(HERE, 6, 0), (THERE, 7, 0)]], (5, 7), True),
        ([[(HERE, 5, 0), (THERE, 5, 0)], [(HERE, 7, 0), (THERE, 7, 0)]], (5, 7), False),
        ([[(THERE, 5, 0)], [(HERE, 7, 0)]], (5, 7), False),
        ([[(THERE, 5, 0)], []], (5, 7), False),
        ([[(THERE, 1, 0)], [(THERE, 0, 0)]], (True, False), False),
        ([[(THERE, 5, 0)], [(THERE, 7, 0)]], ("5", "7"), False),
        ([[(THERE, 5, 0)]], (5,), False),
        ([[(THERE, 0.5, 0)], [(THERE, 0.25, 0)]], (0.5, 0.25), True),
    ],
)
def test_a_number_is_traced_to_the_read_that_gave_it_or_it_but_for_an_offset(reads, numbers, told):
    steps = {i: Step(i, reads=r) for i, r in enumerate(reads, 1)}
    text = traced(dict(enumerate(numbers, 1)), steps, place)
    assert text == ("; the number comes from the device value read at /a/b.py:7 (n = x.item())" if told else "")


@pytest.mark.parametrize(
    ("second", "severity", "cause"),
    [
        (((5, 6),), Severity.WARNING, HERE),
        (((6, 5),), Severity.ERROR, ()),
        (((5, 6), (7, 8)), Severity.ERROR, ()),
    ],
)
def test_a_rebound_tensor_is_an_error_where_it_is_used_first(second, severity, cause):
    """Later uses of the same one follow from it; another binding does not."""
    runs = [
        [op(externals=(pair,)), op(chain=THERE, externals=tuple(s[which] for s in second))]
        for which, pair in enumerate((5, 6))
    ]
    steps = [Step(i, ops=ops) for i, ops in zip((1, 3), runs, strict=True)]
    found, _ = differences(steps[0], steps[1:], {3: WRONG}, StorageTable({}, {5, 6, 7, 8}, {}, {}), {3: set()})
    assert [(f.code, f.severity, f.cause) for f in found] == [
        ("CG205", Severity.ERROR, ()),
        ("CG205", severity, cause),
    ]
