# vllm#15090/#52376, TGI#2180: adapters by name, with a factor of their own; a step that captured none of them.
import torch

D, R = 8, 2


class L(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(D, D, device="cuda")
        self.a = torch.nn.ParameterDict({n: torch.randn(R, D, device="cuda") for n in "xyz"})
        self.b = torch.nn.ParameterDict({n: torch.randn(D, R, device="cuda") for n in "xyz"})
        self.alpha = {"x": 1.0, "y": 2.0, "z": 0.5}
        self.active = None
        self.stack_a = torch.zeros(4, R, D, device="cuda")
        self.stack_b = torch.zeros(4, D, R, device="cuda")
        for j, n in enumerate("xyz"):
            self.stack_a[j + 1].copy_(self.a[n].detach())
            self.stack_b[j + 1].copy_(self.b[n].detach() * self.alpha[n])

    def forward(self, x, slots=None):
        y = self.base(x)
        if slots is not None:
            a, b = self.stack_a[slots], self.stack_b[slots]
            return y + torch.einsum("ndr,nr->nd", b, torch.einsum("nrd,nd->nr", a, x))
        if self.active:
            y = y + self.alpha[self.active] * ((x @ self.a[self.active].T) @ self.b[self.active].T)
        return y


def _make(kind):
    m = L()

    @torch.no_grad()
    def step(x, slots=None):
        return m(x, slots)

    order = [None, None, None, None, None, "x", "y", "z"]  # no adapter in the first five batches

    def inputs(i):
        x = torch.full((3, D), 0.1 * (i + 1), device="cuda")
        if kind == "host":
            m.active = order[i % len(order)]
            return (x,)
        return x, torch.full((3,), [0, 0, 0, 0, 0, 1, 2, 3][i % 8], device="cuda", dtype=torch.int64)

    return step, inputs


def host():
    return _make("host")


def slots():
    return _make("slots")
