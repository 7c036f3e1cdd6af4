# An autotuner meets a new key after the graph was captured: the graph keeps the config and the number of the old one.
import torch
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"B": 16}), triton.Config({"B": 32})], key=["rows"])
@triton.jit
def scale(x, out, rows, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + at, mask=at < rows, other=0.0)
    tl.store(out + at, value * 2, mask=at < rows)


def new_key():
    out = torch.zeros(32, device="cuda")

    def step(x, rows):
        scale[lambda meta: (triton.cdiv(rows, meta["B"]),)](x, out, rows)
        return out

    return step, lambda i: (torch.full((32,), 1.0 + i, device="cuda"), 16 if i < 6 else 24)
