"""Time of a simulation over that of the same steps run eagerly: 16 layers of width 1024, one token.

    OMP_NUM_THREADS=1 python tests/check/measure_cost.py
    OMP_NUM_THREADS=1 python tests/check/measure_cost.py --folder SOURCES   # and of the command, in CPU seconds

The command is measured on a small step, beside `import torch` alone, and on the Python files of a folder.
"""

import argparse
import itertools
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from onegraph.check import check_step
from onegraph.engine.record import emit, machine

WIDTH, LAYERS, HEADS, CONTEXT, STEPS = 1024, 16, 16, 128, 4


class Block(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, device=device) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, device=device)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False, device=device)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False, device=device)
        shape = (1, HEADS, CONTEXT, WIDTH // HEADS)
        self.register_buffer("keys", torch.zeros(shape, device=device))
        self.register_buffer("values", torch.zeros(shape, device=device))

    def forward(self, x, position, mask):
        q, k, v = self.qkv(self.norms[0](x)).view(1, 1, 3, HEADS, WIDTH // HEADS).unbind(2)
        self.keys.index_copy_(2, position, k.transpose(1, 2))
        self.values.index_copy_(2, position, v.transpose(1, 2))
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), self.keys, self.values, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(1, 1, WIDTH))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def factory(device="cuda"):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(device) for _ in range(LAYERS)).eval()
    rows = torch.arange(CONTEXT, device=device)

    @torch.no_grad()
    def step(x, position):
        mask = (rows <= position).view(1, 1, 1, CONTEXT)
        for block in blocks:
            x = block(x, position, mask)
        return x

    def inputs(i):
        return torch.full((1, 1, WIDTH), 0.1 * (i + 1), device=device), torch.tensor([i], device=device)

    return step, inputs


def measure(repeats=3):
    """(eager seconds of building and STEPS steps, simulated seconds of the same, report): the best of `repeats`."""
    eager, simulated = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        step, inputs = factory("cpu")
        for i in range(STEPS):
            step(*inputs(i))
        eager.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        report = check_step(factory, steps=STEPS)
        simulated.append(time.perf_counter() - begin)
    return min(eager), min(simulated), report


def measure_step(steps=9):
    """(median CPU seconds of an eager step, the same of a simulated one with its replay).

    CPU seconds, because others take the machine for a while without asking; from the begin of a step to that of the
    next one, because what building a model costs differs more than steps do.
    """
    begins = []

    def built(device="cuda"):
        step, inputs = factory(device)

        def noted(i):
            begins.append(time.process_time())
            return inputs(i)

        return step, noted

    def median():
        seconds = [after - before for before, after in itertools.pairwise(begins[2:])]  # the first: warm-up, capture
        begins.clear()
        return statistics.median(seconds)

    step, inputs = built("cpu")
    for i in range(steps):
        step(*inputs(i))
    eager = median()
    check_step(built, steps=steps)
    return eager, median()


def measure_command(*words):
    """CPU seconds of `python WORDS`, its own processes included: the least of three."""
    tries = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        tries.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(min(tries), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument("--folder", type=Path, help="read the Python files of this folder, too")
    arguments = parser.parse_args()
    out, about = arguments.out, machine("cpu")
    if arguments.folder:
        small = f"{Path(__file__).parent}/corpus/h01_item.py:factory_ok_gather"
        row = {
            "bench": "check-cost",
            "what": "onegraph check, one small step",
            "cpu_s": measure_command("-m", "onegraph", "check", small),
        }
        emit(row | {"torch_cpu_s": measure_command("-c", "import torch")} | about, out)
        count = len(list(arguments.folder.rglob("*.py")))
        seconds = measure_command("-m", "onegraph", "check", str(arguments.folder))
        emit(
            {"bench": "check-cost", "what": f"onegraph check, a folder of {count} files", "cpu_s": seconds} | about, out
        )
        return
    check_step(factory, steps=3)  # imports
    eager, simulated, report = measure()
    model = f"{LAYERS} layers of width {WIDTH}"
    row = {"bench": "check-cost", "what": f"{model}: built and {STEPS} eager steps, and simulated"}
    row |= {"eager_s": round(eager, 3), "simulated_s": round(simulated, 3), "times": round(simulated / eager, 1)}
    emit(row | {"verdict": str(report.verdict)} | about, out)
    eager, simulated = measure_step()
    row["what"] = f"{model}: one eager step, and one more simulated with its replay"
    row |= {"eager_s": round(eager, 4), "simulated_s": round(simulated, 4), "times": round(simulated / eager, 1)}
    emit(row | about, out)


if __name__ == "__main__":
    main()
