"""Host data in the step, and shapes that depend on values: CG102 to CG107, CG307."""

import torch
from torch.nn import functional as F

ROWS = torch.arange(4)


def rows(i):
    return (torch.arange(16.0, device="cuda").view(4, 4) + i,)


def bad_CG102_where():
    zero = torch.zeros(())
    return lambda x: torch.where(x > 3, x, zero), rows


def good_CG102_where():
    return lambda x: torch.where(x > 3, x, 0.0), rows


def bad_CG102_literal():
    def step(x):
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")

    return step, rows


def good_CG102_literal():
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")

    def step(x):
        return x * scale

    return step, rows


def lengths(i):
    return torch.ones(4, device="cuda"), [i, i + 1, i + 2, i + 3]


def bad_CG102_host_data():
    return lambda x, sizes: x * torch.tensor(sizes, device="cuda"), lengths


def good_CG102_host_data():
    return lambda x, sizes: x * sizes, lambda i: (lengths(i)[0], torch.tensor(lengths(i)[1], device="cuda"))


def bad_CG102_pinned():
    table = torch.arange(4.0).pin_memory()
    return lambda x: x * table.to("cuda"), rows


def good_CG102_pinned():
    table = torch.arange(4.0).pin_memory()
    return lambda x: x * table.to("cuda", non_blocking=True), rows


def bad_CG102_copy_():
    source, buffer = torch.arange(4.0), torch.zeros(4, device="cuda")
    return lambda x: x * buffer.copy_(source), rows


def good_CG102_copy_():
    source, buffer = torch.arange(4.0).pin_memory(), torch.zeros(4, device="cuda")
    return lambda x: x * buffer.copy_(source, non_blocking=True), rows


class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.arange(4.0)

    def forward(self, x):
        return x * self.table.to(x.device)


class RegisteredTable(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x):
        return x * self.table


def bad_CG102_move():
    return Table().to("cuda"), rows


def good_CG102_move():
    return RegisteredTable().to("cuda"), rows


def bad_CG103_list_index():
    return lambda x: x[[0, 2]] * 2, rows


def good_CG103_list_index():
    index = torch.tensor([0, 2], device="cuda")
    return lambda x: x[index] * 2, rows


def bad_CG103_write():
    out, index = torch.zeros(4, device="cuda"), torch.tensor([1, 2], device="cuda")

    def step(x):
        out[index] = 5.0
        return x * out

    return step, rows


def good_CG103_write():
    out, index = torch.zeros(4, device="cuda"), torch.tensor([1, 2], device="cuda")

    def step(x):
        out.index_fill_(0, index, 5.0)
        return x * out

    return step, rows


def bad_CG103():
    return lambda x: x[ROWS] * 2, rows


def good_CG103():
    index = ROWS.to("cuda")
    return lambda x: x[index] * 2, rows


def ids(i):
    return (torch.tensor([0, 1, i % 4, 3], device="cuda"),)


def bad_CG104_repeat_interleave():
    values = torch.arange(4.0, device="cuda")
    return lambda counts: values.repeat_interleave(counts).sum(), lambda i: (torch.full((4,), 2, device="cuda"),)


def good_CG104_repeat_interleave():
    values = torch.arange(4.0, device="cuda")
    return (
        lambda counts: values.repeat_interleave(counts, output_size=8).sum(),
        lambda i: (torch.full((4,), 2, device="cuda"),),
    )


def bad_CG104_unique():
    return lambda chosen: torch.unique(chosen), ids


def good_CG104_unique():
    def step(chosen):
        s = chosen.sort().values
        new = s[1:] != s[:-1]
        return s, new

    return step, ids


def bad_CG104_bincount():
    return lambda chosen: torch.bincount(chosen, minlength=4), ids


def good_CG104_bincount():
    one = torch.ones(4, dtype=torch.int64, device="cuda")
    return lambda chosen: torch.zeros(4, dtype=torch.int64, device="cuda").scatter_add_(0, chosen, one), ids


def bad_CG104_nonzero():
    def step(x):
        hit = torch.nonzero(x > 5)
        return hit * 2

    return step, rows


def good_CG104_nonzero():
    def step(x):
        hit = x > 5
        return torch.where(hit, x, 0)

    return step, rows


def bad_CG104_mask_write():
    def step(x):
        y = x * 1
        y[y > 5] = y.mean()
        return y

    return step, rows


def good_CG104_mask_write():
    def step(x):
        y = x * 1
        y.copy_(torch.where(y > 5, y.mean(), y))
        return y

    return step, rows


def bad_CG104_mask():
    def step(x):
        mask = x > 5
        return x[mask].mean()

    return step, rows


def good_CG104_mask():
    def step(x):
        mask = x > 5
        return torch.where(mask, x, 0).sum() / mask.sum()

    return step, rows


def matrix(i):
    return (torch.eye(3, device="cuda") * (i + 2),)


def bad_CG105_inv():
    return lambda x: torch.linalg.inv(x), matrix


def good_CG105_inv():
    return lambda x: torch.linalg.inv_ex(x).inverse, matrix


def bad_CG105_cholesky():
    return lambda x: torch.linalg.cholesky(x), matrix


def good_CG105_cholesky():
    return lambda x: torch.linalg.cholesky_ex(x).L, matrix


def bad_CG105_solve():
    return lambda x: torch.linalg.solve(x, torch.ones(3, 1, device="cuda")), matrix


def good_CG105_solve():
    return lambda x: torch.linalg.solve_ex(x, torch.ones(3, 1, device="cuda")).result, matrix


def bad_CG105_histc():
    return lambda x: torch.histc(x, bins=4), rows


def good_CG105_histc():
    return lambda x: torch.histc(x, bins=4, min=0.0, max=16.0), rows


def wanted(i):
    return torch.arange(64, device="cuda") + i, torch.arange(0, 128, 2, device="cuda")


def bad_CG105_isin():
    return lambda x, w: torch.isin(x, w), wanted


def good_CG105_isin():
    return lambda x, w: (x[..., None] == w).any(-1), wanted


def bad_CG105_normal():
    deviation = torch.ones(4, 4, device="cuda")
    return lambda x: torch.normal(x, deviation), rows


def good_CG105_normal():
    deviation = torch.ones(4, 4, device="cuda")
    return lambda x: x + deviation * torch.randn_like(x), rows


def runs(i):
    return torch.arange(4.0, device="cuda") + i, torch.tensor([2, 2], device="cuda")


def bad_CG105_segment_reduce():
    return lambda x, n: torch.segment_reduce(x, "sum", lengths=n), runs


def good_CG105_segment_reduce():
    return lambda x, n: torch.segment_reduce(x, "sum", lengths=n, unsafe=True), runs


def grouped(i):
    given = torch.arange(256.0, device="cuda").view(16, 16) + i
    return given, torch.ones(2, 16, 16, device="cuda"), torch.tensor([8, 16], dtype=torch.int32, device="cuda")


def bad_CG105_grouped_mm():
    return lambda x, w, ends: torch._grouped_mm(x, w, offs=ends), grouped


def good_CG105_grouped_mm():
    return lambda x, w, ends: torch._grouped_mm(x.bfloat16(), w.bfloat16(), offs=ends).float(), grouped


def sparse(*, coalesced):
    where, values = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), torch.arange(1.0, 5.0)
    made = torch.sparse_coo_tensor(where, values, (4, 4))
    return (made.coalesce() if coalesced else made).to("cuda")


def bad_CG105_product():
    factor = sparse(coalesced=False)
    return lambda x: factor @ x, rows


def good_CG105_product():
    factor = sparse(coalesced=True)
    return lambda x: factor @ x, rows


def bad_CG106_event_or_stream():
    side = torch.cuda.Stream()

    def step(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        side.synchronize()
        torch.cuda.current_stream().wait_stream(side)
        return y + 1

    return step, rows


def good_CG106_event_or_stream():
    side = torch.cuda.Stream()

    def step(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return y + 1

    return step, rows


def bad_CG107_pinned_allocation():
    def step(x):
        host = torch.zeros(4, pin_memory=True)
        return x * host.to("cuda", non_blocking=True)

    return step, rows


def good_CG107_pinned_allocation():
    host = torch.zeros(4, pin_memory=True)

    def step(x):
        return x * host.to("cuda", non_blocking=True)

    return step, rows


def double(x):
    return x * 2


def bad_CG307_compile():
    return lambda x: torch.compile(double)(x), rows


def good_CG307_compile():
    compiled = torch.compile(double)
    return lambda x: compiled(x), rows


def bad_CG307_graph():
    static, graph = torch.zeros(4, 4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = static * 2

    def step(x):
        static.copy_(x)
        graph.replay()
        return doubled

    return step, rows


def good_CG307_graph():
    return lambda x: x * 2, rows


def bad_CG307_mode():
    compiled = torch.compile(double, mode="reduce-overhead")
    return lambda x: compiled(x), rows


def good_CG307_mode():
    compiled = torch.compile(double)
    return lambda x: compiled(x), rows


def bad_CG104_one_hot():
    return lambda chosen: F.one_hot(chosen).sum(0), ids


def good_CG104_one_hot():
    return lambda chosen: F.one_hot(chosen, num_classes=4).sum(0), ids
