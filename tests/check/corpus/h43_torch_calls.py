"""Steps whose work is torch's own: compiled functions, ops that call functions, modules and ops as the step itself."""

import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def _x(i, rows=16, columns=16):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(4000 + i)).to("cuda")


def _inputs(i):
    return (_x(i),)


def _layers():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to("cuda")


def factory_bad_captures_graphs_of_its_own():  # hazard: 27
    layers = torch.compile(_layers(), mode="reduce-overhead")
    return torch.no_grad()(lambda x: layers(x)), _inputs  # expect: CG307


def factory_ok_compiled():
    layers = torch.compile(_layers())
    return torch.no_grad()(lambda x: layers(x)), _inputs


def factory_bad_compiled_around_a_read():  # hazard: 1
    @torch.compile
    def scaled(x):
        return x / x.abs().max().item()  # expect: CG101, CG202 optional

    return (lambda x: scaled(x)), _inputs


def _mask():
    return create_block_mask(lambda batch, head, query, key: query >= key, None, None, 16, 16, device="cuda")


def factory_bad_attends_uncompiled():  # hazard: 3
    mask = _mask()

    def step(x):
        rows = x[None, None]
        return flex_attention(rows, rows, rows, block_mask=mask)  # expect: CG102

    return step, _inputs


def factory_ok_attends_compiled():
    mask, attend = _mask(), torch.compile(flex_attention)

    def step(x):
        rows = x[None, None]
        return attend(rows, rows, rows, block_mask=mask)

    return step, _inputs


def factory_bad_chooses_by_cond():  # hazard: 9
    return (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))), _inputs  # expect: CG101|CG108


def factory_bad_loops_on_the_device():  # hazard: 9
    start = torch.zeros((), dtype=torch.long, device="cuda")

    def step(x):
        return while_loop(lambda n, t: n < 3, lambda n, t: (n + 1, t * 2), (start, x))[1]  # expect: CG101|CG108

    return step, _inputs


def factory_ok_scans():
    return (lambda x: scan(lambda total, row: (total + row, (total + row).clone()), x[0], x)[1]), _inputs


def factory_bad_op_is_the_step():  # hazard: 5  # expect: CG104
    return torch.nonzero, _inputs


def factory_bad_checked_op_is_the_step():  # hazard: 6  # expect: CG105
    return torch.linalg.inv, _inputs


def factory_bad_module_is_the_step():  # hazard: 6  # expect: CG101|CG104|CG105|CG108
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).to("cuda").eval()
    padding = torch.arange(16).expand(2, 16) >= torch.tensor([[9], [12]])
    return torch.no_grad()(encoder), lambda i: (_x(i, 32).view(2, 16, 16), None, padding.to("cuda"))


def factory_ok_module_is_the_step():
    return torch.no_grad()(_layers()), _inputs


def factory_bad_catches_the_error_of_a_capture():  # hazard: 1
    def step(x):
        try:
            largest = float(x.max())  # expect: CG101
        except RuntimeError:
            largest = 1.0
        y = x / largest  # expect: CG202 optional
        return y.softmax(-1)

    return step, _inputs
