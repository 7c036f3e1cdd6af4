"""Optimiser, loss and adapter kernels."""
import functools

import numpy as np
import torch
import triton
import triton.language as tl


def _t(seed, *shape, std=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).to("cuda")


# --------------------------------------------------------------------------- Adam
@triton.jit
def _adam_kernel(p_ptr, g_ptr, m_ptr, v_ptr, lr, c1, c2, n, B1: tl.constexpr, B2: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = o < n
    g = tl.load(g_ptr + o, mask=k, other=0.0)
    m = B1 * tl.load(m_ptr + o, mask=k, other=0.0) + (1 - B1) * g
    v = B2 * tl.load(v_ptr + o, mask=k, other=0.0) + (1 - B2) * g * g
    tl.store(m_ptr + o, m, mask=k)
    tl.store(v_ptr + o, v, mask=k)
    p = tl.load(p_ptr + o, mask=k)
    tl.store(p_ptr + o, p - lr * (m / c1) / (tl.sqrt(v / c2) + 1e-8), mask=k)


@triton.jit
def _adam_dev_kernel(p_ptr, g_ptr, m_ptr, v_ptr, t_ptr, lr_ptr, n, B1: tl.constexpr, B2: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = o < n
    t = tl.load(t_ptr)
    c1 = 1.0 - tl.exp(t * tl.log(B1 + 0.0 * t))
    c2 = 1.0 - tl.exp(t * tl.log(B2 + 0.0 * t))
    g = tl.load(g_ptr + o, mask=k, other=0.0)
    m = B1 * tl.load(m_ptr + o, mask=k, other=0.0) + (1 - B1) * g
    v = B2 * tl.load(v_ptr + o, mask=k, other=0.0) + (1 - B2) * g * g
    tl.store(m_ptr + o, m, mask=k)
    tl.store(v_ptr + o, v, mask=k)
    p = tl.load(p_ptr + o, mask=k)
    tl.store(p_ptr + o, p - tl.load(lr_ptr) * (m / c1) / (tl.sqrt(v / c2) + 1e-8), mask=k)


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99)):
        super().__init__(params, dict(lr=lr, betas=betas, step=0))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(m=torch.zeros_like(p), v=torch.zeros_like(p))

    @torch.no_grad()
    def step(self, grads):
        it = iter(grads)
        for group in self.param_groups:
            group["step"] += 1  # expect: CG210|CG202 optional @fused_adam
            b1, b2 = group["betas"]
            c1, c2 = 1 - b1 ** group["step"], 1 - b2 ** group["step"]
            for p in group["params"]:
                s, n = self.state[p], p.numel()
                _adam_kernel[(triton.cdiv(n, 64),)](p, next(it).contiguous(), s["m"], s["v"], group["lr"], c1, c2, n, B1=b1, B2=b2, BLOCK=64)  # expect: CG202 @fused_adam


def factory_bad_fused_adam():  # hazard: 11
    net = torch.nn.ParameterDict({"a": _t(1, 12, 20, std=0.3), "b": _t(2, 20, 4, std=0.3)})
    opt = FusedAdam(net.parameters(), lr=0.05)

    def step(x, y):
        loss = (torch.tanh(x @ net["a"]) @ net["b"] - y).square().mean()
        opt.step(torch.autograd.grad(loss, list(net.parameters())))
        return loss.detach(), net["b"].detach().clone()

    return step, lambda i: (_t(50 + i, 6, 12), _t(60 + i, 6, 4))


def factory_ok_capturable_adam():  # hazard: 11
    class Capturable:
        def __init__(self, params, lr):
            self.params = list(params)
            self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.params]
            self.t = torch.zeros((), device="cuda")
            self.lr = torch.full((), lr, device="cuda")

        @torch.no_grad()
        def update(self, grads):
            self.t += 1
            for p, g, (m, v) in zip(self.params, grads, self.moments):
                grid = (triton.cdiv(p.numel(), 64),)
                _adam_dev_kernel[grid](p, g.contiguous(), m, v, self.t, self.lr, p.numel(), B1=0.9, B2=0.99, BLOCK=64)
            self.lr.mul_(0.9)

    w = torch.nn.Linear(12, 4, device="cuda")
    w.load_state_dict({"weight": _t(3, 4, 12, std=0.3), "bias": _t(4, 4)})
    opt = Capturable(w.parameters(), 0.05)

    def step(x, y):
        loss = torch.nn.functional.huber_loss(w(x), y)
        opt.update(torch.autograd.grad(loss, opt.params))
        return {"loss": loss.detach(), "w": w.weight.detach().clone()}

    return step, lambda i: (_t(70 + i, 6, 12), _t(80 + i, 6, 4))


# --------------------------------------------------------------------------- cross entropy
@triton.jit
def _ce_row(x_ptr, c, V, y):
    x = tl.load(x_ptr + c, mask=c < V, other=-float("inf"))
    m = tl.max(x, 0)
    lse = m + tl.log(tl.sum(tl.exp(x - m), 0))
    hit = tl.sum(tl.where(c == y, x, 0.0), 0)
    return x, lse, lse - hit


@triton.jit
def _ce_host_count_kernel(x_ptr, y_ptr, loss_ptr, dx_ptr, inv_n, V, IGNORE: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    y = tl.load(y_ptr + r)
    x, lse, loss = _ce_row(x_ptr + r * V, c, V, y)
    w = tl.where(y != IGNORE, inv_n, 0.0)
    tl.store(loss_ptr + r, loss * w)
    tl.store(dx_ptr + r * V + c, (tl.exp(x - lse) - (c == y).to(tl.float32)) * w, mask=c < V)


@triton.jit
def _ce_dev_count_kernel(x_ptr, y_ptr, loss_ptr, dx_ptr, n_ptr, V, IGNORE: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    y = tl.load(y_ptr + r)
    x, lse, loss = _ce_row(x_ptr + r * V, c, V, y)
    w = tl.where(y != IGNORE, 1.0 / tl.load(n_ptr), 0.0)
    tl.store(loss_ptr + r, loss * w)
    tl.store(dx_ptr + r * V + c, (tl.exp(x - lse) - (c == y).to(tl.float32)) * w, mask=c < V)


class FusedCE(torch.autograd.Function):
    IGNORE = -100

    @classmethod
    def weight(cls, labels):
        return 1.0 / max((labels != cls.IGNORE).sum().item(), 1)  # expect: CG101 @fused_ce_count

    @classmethod
    def launch(cls, logits, labels, loss, dx):
        rows, v = logits.shape
        _ce_host_count_kernel[(rows,)](logits, labels, loss, dx, cls.weight(labels), v, IGNORE=cls.IGNORE, BLOCK=triton.next_power_of_2(v))

    @classmethod
    def forward(cls, ctx, logits, labels):
        loss = logits.new_empty(logits.shape[0])
        dx = torch.empty_like(logits)
        cls.launch(logits, labels, loss, dx)
        ctx.save_for_backward(dx)
        return loss.sum()

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0] * g, None


class FusedCEDevice(FusedCE):
    @classmethod
    def launch(cls, logits, labels, loss, dx):
        n = (labels != cls.IGNORE).sum().clamp_(min=1)
        rows, v = logits.shape
        _ce_dev_count_kernel[(rows,)](logits, labels, loss, dx, n, v, IGNORE=cls.IGNORE, BLOCK=triton.next_power_of_2(v))


def _ce_inputs(base):
    def inputs(i):
        y = (torch.arange(6) * 7 + i).remainder(10)
        y[: 1 + i % 4] = -100
        return _t(base + i, 6, 16), y.to("cuda")
    return inputs


def factory_bad_fused_ce_count():  # hazard: 1
    w = _t(5, 16, 10, std=0.3).requires_grad_()

    def step(x, y):
        loss = FusedCE.apply(x @ w, y)
        (g,) = torch.autograd.grad(loss, (w,))
        w.data.add_(g, alpha=-0.5)
        return loss.detach()

    return step, _ce_inputs(90)


def factory_ok_fused_ce_device_count():  # hazard: 1
    head = torch.nn.Parameter(_t(6, 16, 10, std=0.3))
    accum = torch.zeros_like(head, requires_grad=False)

    def step(x, y):
        loss = FusedCEDevice.apply(x @ head, y)
        (g,) = torch.autograd.grad(loss, (head,))
        with torch.no_grad():
            accum.lerp_(g, 0.5)
            head.sub_(0.5 * accum)
        return loss.detach(), accum.norm()

    return step, _ce_inputs(100)


# --------------------------------------------------------------------------- adapters
@triton.jit
def _lora_kernel(x_ptr, a_ptr, b_ptr, y_ptr, D: tl.constexpr, R: tl.constexpr):
    t = tl.program_id(0)
    d = tl.arange(0, D)
    r = tl.arange(0, R)
    x = tl.load(x_ptr + t * D + d)
    a = tl.load(a_ptr + t * D * R + d[:, None] * R + r[None, :])
    h = tl.sum(x[:, None] * a, 0)
    b = tl.load(b_ptr + t * R * D + r[:, None] * D + d[None, :])
    tl.store(y_ptr + t * D + d, x + tl.sum(h[:, None] * b, 0))


@triton.jit
def _lora_indexed_kernel(x_ptr, a_ptr, b_ptr, idx_ptr, y_ptr, D: tl.constexpr, R: tl.constexpr):
    t = tl.program_id(0)
    d = tl.arange(0, D)
    r = tl.arange(0, R)
    x = tl.load(x_ptr + t * D + d)
    j = tl.load(idx_ptr + t)
    if j >= 0:
        a = tl.load(a_ptr + j * D * R + d[:, None] * R + r[None, :])
        h = tl.sum(x[:, None] * a, 0)
        b = tl.load(b_ptr + j * R * D + r[:, None] * D + d[None, :])
        x += tl.sum(h[:, None] * b, 0)
    tl.store(y_ptr + t * D + d, x)


class AdapterBank:
    def __init__(self, n, d, r):
        self.a, self.b = _t(7, n, d, r, std=0.2), _t(8, n, r, d, std=0.2)
        self.slots = {}

    def slot(self, name):
        return self.slots.setdefault(name, len(self.slots))

    def select(self, names):
        rows = [self.slot(n) for n in names]
        return self.a[rows], self.b[rows]  # expect: CG103|CG102 @adapter_names

    def indices(self, names):
        return torch.tensor([self.slot(n) if n else -1 for n in names], dtype=torch.int32, device="cuda")


def factory_bad_adapter_names():  # hazard: 4
    bank = AdapterBank(4, 16, 4)
    users = ["fr", "sql", "fr"]

    def step(x):
        a, b = bank.select(users)
        y = torch.empty_like(x)
        _lora_kernel[(x.shape[0],)](x, a, b, y, D=16, R=4)
        return y

    return step, lambda i: (_t(110 + i, 3, 16),)


def factory_ok_adapter_indices():  # hazard: 4
    bank = AdapterBank(4, 16, 4)
    lanes = bank.indices(["fr", "", "sql"])

    def step(x):
        y = torch.empty_like(x)
        _lora_indexed_kernel[(x.shape[0],)](x, bank.a, bank.b, lanes, y, D=16, R=4)
        lanes.copy_(torch.roll(lanes, 1))
        return y, lanes.clone()

    return step, lambda i: (_t(120 + i, 3, 16),)


# --------------------------------------------------------------------------- stochastic rounding
@triton.jit
def _grid_round(x, u, step):
    return tl.floor(x / step + u) * step


@triton.jit
def _sr_kernel(x_ptr, y_ptr, seed, step, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n, other=0.0)
    tl.store(y_ptr + o, _grid_round(x, tl.rand(seed, o), step), mask=o < n)


@triton.jit
def _sr_dev_kernel(x_ptr, y_ptr, seed_ptr, step, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n, other=0.0)
    tl.store(y_ptr + o, _grid_round(x, tl.rand(tl.load(seed_ptr), o), step), mask=o < n)


@torch.library.custom_op("blindtrdev::stochastic_round", mutates_args=())
def stochastic_round(x: torch.Tensor, seed: int, step: float) -> torch.Tensor:
    y = torch.empty_like(x)
    _sr_kernel[(triton.cdiv(x.numel(), 64),)](x, y, seed, step, x.numel(), BLOCK=64)  # expect: CG202 @numpy_rounding_seed
    return y


@stochastic_round.register_fake
def _(x, seed, step):
    return torch.empty_like(x)


class LowPrecisionEMA:
    def __init__(self, shape, seed):
        self.value = torch.zeros(shape, device="cuda")
        self.rng = np.random.default_rng(seed)

    def update(self, x):
        mixed = self.value * 0.75 + x * 0.25
        seed = int(self.rng.integers(1 << 31))
        self.value.copy_(torch.ops.blindtrdev.stochastic_round(mixed, seed, 0.125))  # expect: CG202 optional @numpy_rounding_seed
        return self.value


def factory_bad_numpy_rounding_seed():  # hazard: 11
    ema = LowPrecisionEMA((4, 20), 3)
    w = _t(9, 20, 20, std=0.3)
    return (lambda x: ema.update(x @ w) * 1.0), lambda i: (_t(130 + i, 4, 20),)


def factory_ok_device_rounding_seed():  # hazard: 11
    seed = torch.tensor([11], dtype=torch.int64, device="cuda")
    state = torch.zeros(4, 20, device="cuda")

    @functools.wraps(stochastic_round)
    def rounded(x, step):
        y = torch.empty_like(x)
        _sr_dev_kernel[(triton.cdiv(x.numel(), 64),)](x, y, seed, step, x.numel(), BLOCK=64)
        seed.mul_(1103515245).add_(12345).remainder_(2 ** 31)
        return y

    def step(x):
        for scale in (0.125, 0.25):
            state.lerp_(x, 0.25)
            state.copy_(rounded(state, scale))
        return state + 0

    return step, lambda i: (_t(140 + i, 4, 20),)
