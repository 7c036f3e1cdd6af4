"""What an H200 captures and replays well, and the check once called bad."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from onegraph.check import check_step
from onegraph.check.cli import add_parsers


def x(i: int) -> torch.Tensor:
    return torch.full((4, 8), float(i + 1), device="cuda")


def codes(factory: Callable[[], Any], **options: Any) -> set[tuple[str, str]]:
    return {(f.code, f.severity.value) for f in check_step(factory, **options).findings}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("segments", [0, 2])
def test_checkpoint_draws_its_dropout_twice(reentrant: bool, segments: int) -> None:
    def factory() -> Any:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)).cuda()

        def step(given: torch.Tensor) -> torch.Tensor:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            if segments:
                out = torch.utils.checkpoint.checkpoint_sequential(model, segments, given, use_reentrant=reentrant)
            else:
                out = torch.utils.checkpoint.checkpoint(model, given, use_reentrant=reentrant)
            out.sum().backward()
            return torch.stack([p.grad.sum() for p in model.parameters()])

        return step, lambda i: (x(i).requires_grad_(),)

    assert codes(factory) == set()


def test_a_number_that_changes_beside_a_checkpoint_is_still_found() -> None:
    def factory() -> Any:
        model, seen = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda(), [0]

        def step(given: torch.Tensor) -> torch.Tensor:
            seen[0] += 1
            out = torch.utils.checkpoint.checkpoint(model, given * seen[0], use_reentrant=False)
            return torch.autograd.grad(out.sum(), list(model.parameters()))[0]

        return step, lambda i: (x(i),)

    assert ("CG202", "error") in codes(factory)


class Counting:
    def __init__(self) -> None:
        self.n, self.tags = 0, [0]

    def bump(self) -> None:
        self.n += 1
        tags = self.tags
        tags[0] += 1


def test_state_is_placed_where_it_changes_and_not_where_a_local_is_called_alike() -> None:
    def factory() -> Any:
        counter, n = Counting(), [0]

        def flat(given: torch.Tensor) -> torch.Tensor:
            n, k = given.shape
            return given.reshape(sum(n for _ in range(k)))  # a cell of its own

        def step(given: torch.Tensor) -> torch.Tensor:
            out = flat(given)
            counter.bump()
            n[0] += 1
            return out

        return step, lambda i: (x(i),)

    found = check_step(factory).findings
    assert sorted(f.source.strip() for f in found) == ["n[0] += 1", "self.n += 1", "tags[0] += 1"]
    assert {f.code for f in found} == {"CG210"}


def masked() -> Any:
    masks: dict[int, torch.Tensor] = {}

    def step(given: torch.Tensor) -> torch.Tensor:
        n = given.shape[1]
        if n not in masks:
            masks[n] = torch.tensor([[float(a <= b) for a in range(n)] for b in range(n)], device="cuda")
        return given @ masks[n]

    return step, lambda i: (x(i),)


def masked_anew() -> Any:
    step, _ = masked()
    return lambda given, n: step(given[:, :n]), lambda i: (x(i), 1 + i % 2)


def test_a_constant_that_the_warm_up_makes_is_no_copy_of_the_step() -> None:
    assert check_step(masked, source=True).findings == ()
    assert "CG102" in {f.code for f in check_step(masked_anew, source=True).findings}, "the captured step makes another"


def over_devices() -> Any:
    weights = [torch.ones(8, device=f"cuda:{i}") for i in range(torch.cuda.device_count())]

    def step(given: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            given = given * weight.to(given.device)
        return given

    return step, lambda i: (x(i),)


def test_a_loop_over_the_devices_sees_as_many_as_were_asked_for() -> None:
    assert codes(over_devices) == set()
    assert codes(over_devices, gpus=2) == {("CG303", "error")}
    counts = []

    def factory() -> Any:
        counts.append(torch.cuda.device_count())
        return (lambda given: given * 2), lambda i: (x(i),)

    check_step(factory)
    check_step(factory, gpus=5)
    assert counts == [1, 5]


def test_nan_is_a_constant() -> None:
    def factory() -> Any:
        def step(given: torch.Tensor) -> torch.Tensor:
            return torch.where(given > 2, given.new_full((4, 8), torch.nan), given)

        return step, lambda i: (x(i),)

    assert codes(factory) == set()


def test_gpus_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    path = tmp_path / "steps.py"
    path.write_text(
        "import torch\ndef factory():\n"
        "    ws = [torch.ones(4, device=f'cuda:{i}') for i in range(torch.cuda.device_count())]\n"
        "    def step(x):\n        return x + sum(w.to('cuda:0') for w in ws)\n"
        "    return step, lambda i: (torch.full((4,), float(i), device='cuda'),)\n"
    )

    def run(*more: str) -> int:
        args = parser.parse_args(["check", f"{path}:factory", *more])
        return int(args.run(args))

    assert run() == 0
    assert run("--gpus", "2") == 1
    for bad in ("0", "65"):
        assert run("--gpus", bad) == 2
        assert f"--gpus: got {bad}, allowed 1 to 64" in capsys.readouterr().err
