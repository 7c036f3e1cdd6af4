"""Second held-out set: quantized linears and their helpers."""

import logging
import math

import torch
from torch import nn

OUT, IN = 8, 16
log = logging.getLogger(__name__)


def _x(i, rows=2):
    generator = torch.Generator().manual_seed(i)
    return (torch.randn(rows, IN, generator=generator).to("cuda"),)


class PackedLinear(nn.Module):
    """AWQ's packing: eight nibbles an int32, in an order that the unpacking undoes."""

    ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

    def __init__(self, shifts_made_once):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.register_buffer("qweight", torch.randint(0, 2**31 - 1, (IN, OUT // 8), generator=g, dtype=torch.int32))
        self.register_buffer("scales", torch.rand(1, OUT, generator=g) * 0.01)
        self.register_buffer("shifts", torch.tensor(self.ORDER, dtype=torch.int32) * 4)
        self.made_once = shifts_made_once

    def unpack(self):
        if self.made_once:
            shifts = self.shifts
        else:
            order = torch.tensor(self.ORDER, device=self.qweight.device)  # expect: CG102 @awq_shifts
            shifts = order.int() * 4
        nibbles = (self.qweight.unsqueeze(-1) >> shifts) & 15
        return (nibbles.flatten(1).float() - 8) * self.scales

    def forward(self, x):
        return x @ self.unpack()


class DelayedScaling(nn.Module):
    """fp8 training's recipe: this step's scale comes from the last steps' maxima."""

    def __init__(self):
        super().__init__()
        self.scale = torch.ones((), device="cuda")
        self.history = torch.ones(4, device="cuda")

    def forward(self, x):
        q = (x * self.scale).round() / self.scale  # expect: CG205|CG206|CG209 @delayed_scaling
        self.history.copy_(self.history.roll(1))
        self.history[:1] = x.abs().amax()
        self.scale = 16.0 / self.history.amax()  # expect: CG205 optional @delayed_scaling
        return q


class LazyDense(nn.Module):
    """Dequantizes at its first call and keeps the result: fine, once warm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.arange(OUT * IN).view(OUT, IN) % 7)
        self.dense = None

    def forward(self, x):
        if self.dense is None:
            self.dense = self.codes.float() * 0.1
        return x @ self.dense.T


def factory_bad_awq_shifts():  # hazard: 3
    layer = PackedLinear(False).to("cuda")
    return (lambda x: layer(x)), _x


def factory_ok_awq_shifts_buffer():
    layer = PackedLinear(True).to("cuda")
    return (lambda x: layer(x)), _x


def factory_bad_delayed_scaling():  # hazard: 14
    scaling = DelayedScaling()
    return (lambda x: scaling(x * 3)), _x


def factory_ok_dense_at_first_call():
    layer = LazyDense().to("cuda")
    return (lambda x: layer(x)), _x


def factory_bad_zero_scale_guard():  # hazard: 1
    def quantize(x):
        scale = x.abs().amax() / 448
        if scale.item() == 0:  # expect: CG101
            scale = torch.ones_like(scale)
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    return quantize, _x


def factory_bad_order_left_on_host():  # hazard: 4
    """GPTQ's g_idx as a plain attribute: `.to("cuda")` of the module leaves it where it was."""

    class Gptq(nn.Module):
        def __init__(self):
            super().__init__()
            self.g_idx = torch.arange(IN) // 4
            self.register_buffer("scales", torch.rand(IN // 4, OUT, generator=torch.Generator().manual_seed(0)))
            self.register_buffer("codes", torch.arange(IN * OUT).view(IN, OUT) % 15)

        def forward(self, x):
            weight = self.scales[self.g_idx] * (self.codes - 8)  # expect: CG103
            return x @ weight

    layer = Gptq().to("cuda")
    return (lambda x: layer(x)), _x


def factory_bad_outlier_columns():  # hazard: 5
    """LLM.int8: columns with outliers are computed apart."""
    weight = torch.randn(IN, OUT, generator=torch.Generator().manual_seed(0)).to("cuda")

    def step(x):
        outliers = (x.abs() > 1.5).any(0).nonzero().squeeze(1)  # expect: CG104
        dense = x[:, outliers] @ weight[outliers]
        rest = x.index_fill(1, outliers, 0.0)
        return dense + (rest * 10).round() / 10 @ weight

    return step, _x


def factory_bad_codebook_sent_each_call():  # hazard: 3
    codebook = torch.linspace(-1, 1, 16)
    codes = (torch.arange(OUT * IN).view(IN, OUT) % 16).to("cuda")

    def lookup(codes, device):
        table = codebook.to(device)  # expect: CG102
        return table[codes]

    return (lambda x: x @ lookup(codes, x.device)), _x


def factory_bad_finite_assertion():  # hazard: 9
    weight = torch.randn(IN, OUT, generator=torch.Generator().manual_seed(0)).to("cuda")

    def step(x):
        y = x @ weight
        assert torch.isfinite(y).all(), "overflow"  # expect: CG108|CG101
        return y

    return step, _x


def factory_bad_scale_in_log_line():  # hazard: 2
    def step(x):
        scale = x.abs().amax()
        log.debug(f"scale {scale}")  # expect: CG101
        return x / scale

    return step, _x


def factory_bad_calibrating_forward():  # hazard: 14
    """An observer that was never switched off: its range is replaced each step."""

    class Observer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("low", torch.zeros(()))
            self.register_buffer("high", torch.ones(()))

        def forward(self, x):
            self.low = torch.minimum(self.low, x.min())  # expect: CG205
            self.high = torch.maximum(self.high, x.max())  # expect: CG205 optional
            return (x - self.low) / (self.high - self.low)

    observer = Observer().to("cuda")
    return (lambda x: observer(x)), lambda i: (_x(i)[0] * (1 + i),)


def factory_bad_clip_by_python_min():  # hazard: 1
    def step(x):
        ratio = min(1.0, 2.0 / x.norm())  # expect: CG108|CG101
        return x * ratio  # expect: CG202 optional

    return step, lambda i: (_x(i)[0] * (0.1 + 0.4 * i),)


def factory_bad_percentile_on_host():  # hazard: 1
    """A clipping point by kthvalue, turned into a number."""

    def step(x):
        rank = math.ceil(0.95 * x.numel())
        limit = float(x.abs().flatten().kthvalue(rank).values)  # expect: CG101
        return x.clamp(-limit, limit)  # expect: CG202 optional

    return step, _x


def factory_bad_same_check():  # hazard: 1
    reference = torch.zeros(2, IN, device="cuda")

    def step(x):
        if torch.equal(x, reference):  # expect: CG101|CG105|CG108
            return x
        return x / 2

    return step, _x


def factory_bad_scale_number_per_step():  # hazard: 11
    """A loss-scale-like number kept by the host and given to a fused op as argument."""

    class Scaler:
        def __init__(self):
            self.value, self.growth = 1.0, 0

        def update(self):
            self.growth += 1  # expect: CG210
            if self.growth % 2 == 0:  # expect: CG201 optional
                self.value *= 2  # expect: CG210 optional

    scaler = Scaler()
    bias = torch.ones(IN, device="cuda")

    def step(x):
        y = torch.add(x, bias, alpha=scaler.value)  # expect: CG202
        scaler.update()
        return y

    return step, _x


def factory_ok_group_dequant():
    codes = (torch.arange(OUT * IN).view(OUT, IN) % 16).to(torch.uint8).to("cuda")
    scales = torch.rand(OUT, IN // 4, generator=torch.Generator().manual_seed(0)).to("cuda")
    zeros = torch.full((OUT, IN // 4), 8.0, device="cuda")

    def step(x):
        groups = (codes.view(OUT, -1, 4).float() - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)
        return x @ groups.view(OUT, IN).T

    return step, _x


def factory_ok_fp8_dynamic():
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0)).to("cuda")
    limit = torch.finfo(torch.float8_e4m3fn).max

    def step(x):
        scale = (x.abs().amax(-1, keepdim=True) / limit).clamp_min(1e-12)
        q = (x / scale).clamp(-limit, limit).to(torch.float8_e4m3fn)
        return (q.float() * scale) @ weight.T

    return step, _x


def factory_ok_two_stages_and_hadamard():
    stages = [(torch.arange(OUT * IN).view(IN, OUT) % 4).float().to("cuda") - s for s in (1.5, 0.5)]

    def butterfly(x):
        size = x.shape[-1]
        step = 1
        while step < size:
            x = x.view(*x.shape[:-1], size // (2 * step), 2, step)
            x = torch.stack([x[..., 0, :] + x[..., 1, :], x[..., 0, :] - x[..., 1, :]], -2).flatten(-3)
            step *= 2
        return x / math.sqrt(size)

    def forward(x):
        y = butterfly(x)
        out = y @ stages[0]
        for power, stage in enumerate(stages[1:], 1):
            out = out + (y @ stage) / 4**power
        return out

    return forward, _x


def factory_ok_constant_zero_dim_on_host():
    """A constant 0-d tensor on the host goes by value; it never changes."""
    limit = torch.tensor(448.0)

    def step(x):
        return x / limit, torch.minimum(x.abs(), limit.to(x.dtype))

    return step, _x


def factory_ok_nf4_table():
    table = torch.linspace(-1, 1, 16, device="cuda")
    packed = torch.arange(IN * OUT // 2, device="cuda").remainder(256).to(torch.uint8)

    def step(x):
        codes = torch.stack([packed >> 4, packed & 15], -1).flatten().int()
        return x @ table[codes].view(IN, OUT)

    return step, _x


def factory_ok_observer_in_place():
    low, high = torch.zeros((), device="cuda"), torch.ones((), device="cuda")

    def step(x):
        torch.minimum(low, x.min(), out=low)
        high.copy_(torch.maximum(high, x.max()))
        return (x - low) / (high - low)

    return step, lambda i: (_x(i)[0] * (1 + i),)
