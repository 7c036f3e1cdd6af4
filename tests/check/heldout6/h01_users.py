"""Sixth held-out set: steps as users of serving engines and training loops write them, larger than a pattern.

Frozen as one long file, because recorded findings name its lines.
"""

import contextlib
import functools
import itertools
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

WIDTH = 8


def _x(i, rows=6, columns=WIDTH):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3000 + i)).to("cuda")


def _one(i):
    return (_x(i),)


def _two(i):
    return _x(i), _x(i + 50)


def _weight(i, rows=WIDTH, columns=WIDTH):
    return _x(100 + i, rows, columns) / columns**0.5


# custom ops as engines register them


@torch.library.custom_op("onegraph_users::silu_and_mul", mutates_args=("out",))
def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


@silu_and_mul.register_fake
def _(out, x):
    return None


@torch.library.custom_op("onegraph_users::scaled_rows", mutates_args=())
def scaled_rows(x: torch.Tensor) -> torch.Tensor:
    largest = x.abs().max().item()  # expect: CG101 @custom_op_reads_inside
    return x / largest  # expect: CG202 optional @custom_op_reads_inside


@scaled_rows.register_fake
def _(x):
    return torch.empty_like(x)


def factory_ok_custom_op_into_a_buffer():
    out = torch.empty(6, WIDTH // 2, device="cuda")

    def step(x):
        torch.ops.onegraph_users.silu_and_mul(out, x)
        return out * 2

    return step, _one


def factory_bad_custom_op_reads_inside():  # hazard: 6
    def step(x):
        return torch.ops.onegraph_users.scaled_rows(x) + 1  # expect: CG101|CG105|CG401 optional

    return step, _one


# a decode loop of several tokens in one step


class TinyLM(nn.Module):
    def __init__(self, vocabulary=32, length=24):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embed = nn.Embedding(vocabulary, WIDTH, _weight=torch.randn(vocabulary, WIDTH, generator=generator))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            for layer in (self.qkv, self.out):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / 3)
        self.register_buffer("keys", torch.zeros(1, length, WIDTH))
        self.register_buffer("values", torch.zeros(1, length, WIDTH))
        self.register_buffer("slots", torch.arange(length))

    def forward(self, token, position):
        hidden = self.embed(token)
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        self.keys.index_copy_(1, position, k[:, None])
        self.values.index_copy_(1, position, v[:, None])
        scores = torch.einsum("bd,bld->bl", q, self.keys) / math.sqrt(WIDTH)
        scores = scores.masked_fill(self.slots > position, float("-inf"))
        hidden = hidden + self.out(torch.einsum("bl,bld->bd", scores.softmax(-1), self.values))
        return hidden @ self.embed.weight.t()


def _prompt(i):
    return torch.tensor([3 + i]).to("cuda"), torch.tensor([i]).to("cuda")


def factory_ok_generates_four_tokens():
    model = TinyLM().to("cuda")

    @torch.inference_mode()
    def step(token, position):
        tokens = []
        for _ in range(4):
            token = model(token, position).argmax(-1)
            position = position + 1
            tokens.append(token)
        return torch.stack(tokens, dim=1)

    return step, _prompt


def factory_bad_generates_until_the_end():  # hazard: 1
    model = TinyLM().to("cuda")
    end = torch.tensor([5]).to("cuda")

    @torch.inference_mode()
    def step(token, position):
        tokens = []
        for _ in range(4):
            token = model(token, position).argmax(-1)
            position = position + 1
            tokens.append(token)
            if (token == end).all():  # expect: CG101|CG108
                break
        return tokens[-1]

    return step, _prompt


def _positions(start=0):
    while True:
        yield start
        start += 1


def factory_bad_position_from_a_generator():  # hazard: 11
    model, positions = TinyLM().to("cuda"), _positions()

    @torch.no_grad()
    def step(token):
        position = torch.full((1,), next(positions), device="cuda")  # expect: CG202
        return model(token, position)

    return step, lambda i: (torch.tensor([3 + i]).to("cuda"),)


class Lengths:
    """A property that looks like host state and is none."""

    def __init__(self):
        self._length = torch.zeros(1, dtype=torch.long, device="cuda")

    @property
    def length(self):
        return int(self._length)  # expect: CG101 @length_is_a_property


def factory_bad_length_is_a_property():  # hazard: 1
    lengths, cache = Lengths(), torch.zeros(16, WIDTH, device="cuda")

    def step(x):
        lengths._length.add_(1)
        cache[: x.size(0)] += x
        return cache[: lengths.length].sum(0)  # expect: CG202 optional, CG201 optional, CG208 optional

    return step, _one


@dataclass
class DecodeState:
    hidden: torch.Tensor
    steps: int = 0


def factory_bad_state_is_replaced():  # hazard: 14
    state, weight = DecodeState(torch.zeros(6, WIDTH, device="cuda")), _weight(1)

    def step(x):
        nonlocal state
        hidden = torch.tanh(state.hidden @ weight + x)  # expect: CG205|CG209|CG206
        state = replace(state, hidden=hidden, steps=state.steps + 1)  # expect: CG210 optional
        return hidden.clone()

    return step, _one


def factory_ok_state_is_written():
    state, weight = DecodeState(torch.zeros(6, WIDTH, device="cuda")), _weight(1)

    def step(x):
        state.hidden.copy_(torch.tanh(state.hidden @ weight + x))
        return state.hidden.clone()

    return step, _one


class PageTable:
    def __init__(self, pages=32):
        self.free = list(range(pages))
        self.table = torch.zeros(2, 8, dtype=torch.long, device="cuda")
        self.used = 0

    def grow(self, row):
        page = self.free.pop()  # expect: CG210 optional @page_of_a_free_list
        self.table[row, self.used % 8] = page  # expect: CG103|CG202 @page_of_a_free_list
        self.used += 1  # expect: CG210 optional @page_of_a_free_list


def factory_bad_page_of_a_free_list():  # hazard: 4
    table, pages = PageTable(), _weight(2, 32, WIDTH)

    def step(x):
        table.grow(0)
        return x[:2] + pages[table.table].sum(1)

    return step, _one


# experts


def factory_bad_splits_by_expert_counts():  # hazard: 2
    weights = torch.stack([_weight(i) for i in range(4)])

    def step(x, scores):
        expert = scores[:, :4].argmax(-1)
        order = expert.argsort(stable=True)
        counts = F.one_hot(expert, 4).sum(0)
        parts = x[order].split(counts.tolist())  # expect: CG101|CG108
        done = torch.cat([part @ w for part, w in zip(parts, weights, strict=True)])  # expect: CG208 optional
        return torch.empty_like(done).index_copy_(0, order, done)

    return step, _two


def factory_ok_experts_by_slots():
    weights = torch.stack([_weight(i) for i in range(4)])
    capacity = 6

    def step(x, scores):
        share, expert = scores[:, :4].softmax(-1).topk(2, dim=-1)
        flat = expert.flatten()
        chosen = F.one_hot(flat, 4)
        slot = (chosen.cumsum(0) - 1).gather(1, flat[:, None])[:, 0]
        place = flat * capacity * 2 + slot
        rows = x.new_zeros(4 * capacity * 2, WIDTH).index_copy(0, place, x.repeat_interleave(2, dim=0))
        done = torch.bmm(rows.view(4, -1, WIDTH), weights).view(-1, WIDTH)[place]
        return (done.view(6, 2, WIDTH) * share[..., None]).sum(1)

    return step, _two


# quantized layers


def factory_ok_unpacks_nibbles():
    packed = torch.randint(0, 2**31, (WIDTH, 1), generator=torch.Generator().manual_seed(1)).int().to("cuda")
    scale = _x(9, WIDTH, 1).abs()

    def step(x):
        shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
        codes = (packed[:, :, None] >> shifts) & 15
        return F.linear(x, (codes.flatten(1).to(x.dtype) - 8) * scale)

    return step, _one


class Int8(torch.Tensor):
    """A weight of int8 codes as quantization libraries make it: a wrapper that dequantizes at each use."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def full(value):
            return value.codes.to(value.scale.dtype) * value.scale if isinstance(value, Int8) else value

        return func(*[full(a) for a in args], **(kwargs or {}))


def factory_ok_weight_is_a_subclass():
    weight = _weight(3)
    scale = weight.abs().amax(1, keepdim=True) / 127
    quantized = Int8((weight / scale).round().to(torch.int8), scale)

    @torch.no_grad()
    def step(x):
        return F.linear(x, quantized)

    return step, _one


class Smooth(nn.Module):
    """A scale that follows the activations, kept as a Python number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.peak = 1.0

    def forward(self, x):
        with contextlib.suppress(RuntimeError):
            now = x.abs().amax().item()  # expect: CG101 @peak_behind_a_suppressed_error
            self.peak = max(self.peak, now)
        return self.linear(x / self.peak)  # expect: CG202 optional @peak_behind_a_suppressed_error


def factory_bad_peak_behind_a_suppressed_error():  # hazard: 1
    model = Smooth().to("cuda")
    return torch.no_grad()(lambda x: model(x)), lambda i: (_x(i) * (i + 1),)


def factory_bad_falls_back_while_capturing():  # hazard: 1
    def step(x):
        try:
            rows = int((x[:, 0] > 0).sum())  # expect: CG101
        except RuntimeError:
            rows = x.size(0)
        return x[:rows].sum(0)  # expect: CG202 optional, CG201 optional, CG208 optional

    return step, _one


# hooks and parametrizations


def factory_bad_hook_clamps_by_a_number():  # hazard: 1
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to("cuda")

    def limit(module, given, out):
        return out.clamp(max=2 * out.mean().item())  # expect: CG101, CG202 optional

    model[0].register_forward_hook(limit)
    return torch.no_grad()(lambda x: model(x)), _one


def factory_ok_hook_keeps_a_mean_on_device():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to("cuda")
    mean = torch.zeros(WIDTH, device="cuda")

    def follow(module, given, out):
        mean.lerp_(out.mean(0), 0.1)

    model[0].register_forward_hook(follow)
    return torch.no_grad()(lambda x: model(x) + mean), _one


class Merged(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.ones(2, WIDTH) / 5), nn.Parameter(torch.ones(WIDTH, 2) / 7)

    def forward(self, weight):
        return weight + self.up @ self.down


def factory_ok_adapter_by_parametrization():
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Merged())
    layer.to("cuda")
    return torch.no_grad()(lambda x: layer(x)), _one


def factory_ok_spectral_norm():
    layer = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).to("cuda").eval()
    return torch.no_grad()(lambda x: layer(x)), _one


def factory_bad_orthogonal_by_matrix_exponential():  # hazard: 6
    layer = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="matrix_exp").to("cuda")
    return torch.no_grad()(lambda x: layer(x)), _one  # expect: CG101|CG104|CG105


# streams


class Overlapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.side = torch.cuda.Stream()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            shared = self.first(x)
        routed = self.second(x)
        torch.cuda.current_stream().wait_stream(self.side)
        return shared + routed


def factory_ok_experts_overlap():
    model = Overlapped().to("cuda")
    return torch.no_grad()(lambda x: model(x)), _one


def factory_ok_marks_with_events():
    start, end = torch.cuda.Event(), torch.cuda.Event()

    def step(x):
        start.record()
        y = (x @ x.t()).softmax(-1)
        end.record()
        return y

    return step, _one


def factory_ok_empties_the_cache():  # hazard: 28
    def step(x):
        y = (x @ x.t()).softmax(-1)
        torch.cuda.empty_cache()
        return y @ x

    return step, _one


# random numbers


def factory_ok_dropout_and_noise():
    def step(x):
        return F.dropout(x, 0.25) + torch.randn_like(x) * 0.1

    return step, _one


def factory_ok_random_order():
    def step(x):
        return x[torch.randperm(x.size(0), device=x.device)]

    return step, _one


def factory_bad_normal_checks_its_deviation():  # hazard: 6
    def step(mean, spread):
        return torch.normal(mean, spread.exp())  # expect: CG101|CG105

    return step, _two


def factory_ok_normal_by_hand():
    return (lambda mean, spread: mean + spread.exp() * torch.randn_like(mean)), _two


# tables that are made when first asked for


@functools.lru_cache(maxsize=8)
def _rope(length, width):
    rates = 1.0 / 10000 ** (torch.arange(0, width, 2, device="cuda") / width)
    angles = torch.outer(torch.arange(length, device="cuda"), rates)
    return angles.cos(), angles.sin()


def _rotated(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def factory_ok_rope_cached_by_length():
    return (lambda x: _rotated(x, *_rope(x.size(0), x.size(1)))), _one


def factory_bad_rope_rows_counted_in_python():  # hazard: 10
    count = itertools.count(1)

    def step(x):
        cos, sin = _rope(32, x.size(1))
        at = next(count)
        return _rotated(x, cos[at], sin[at])  # expect: CG202

    return step, _one


def factory_ok_constants_of_every_kind():
    def step(x):
        low = torch.full((), -1.0, device=x.device)
        high = torch.scalar_tensor(1.0, device=x.device)
        edges = torch.linspace(-2, 2, 9, device=x.device)
        return torch.bucketize(x.clamp(low, high), edges), x.new_full((2, 2), math.pi), torch.eye(3, device=x.device)

    return step, _one


# a tensor where Python expects something else


def factory_ok_goes_over_rows():
    def step(x):
        first, *others = x
        return first + sum(row * (k + 1) for k, row in enumerate(others)), torch.stack(list(x.unbind(1)))

    return step, _one


def factory_bad_sorts_rows_in_python():  # hazard: 1
    def step(x):
        rows = sorted(x, key=lambda row: row[0])  # expect: CG101|CG108
        return torch.stack(rows)  # expect: CG201 optional, CG205 optional

    return step, _one


def factory_bad_square_root_of_math():  # hazard: 1
    def step(x):
        return x / math.sqrt(x.square().sum())  # expect: CG101, CG202 optional

    return step, _one


def factory_bad_range_over_a_count():  # hazard: 1
    rounds = torch.zeros(1, dtype=torch.long, device="cuda")

    def step(x):
        rounds.add_(1)
        for _ in range(rounds % 3):  # expect: CG101|CG108
            x = x @ x.t() @ x  # expect: CG201 optional
        return x

    return step, _one


def factory_bad_segments_are_checked():  # hazard: 6
    lengths = torch.tensor([2, 1, 3]).to("cuda")

    def step(x):
        return torch.segment_reduce(x, "sum", lengths=lengths)  # expect: CG101|CG105

    return step, _one


def factory_ok_segments_unchecked():
    lengths = torch.tensor([2, 1, 3]).to("cuda")
    return (lambda x: torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True)), _one


def factory_bad_runs_are_counted():  # hazard: 5
    def step(x):
        values, counts = torch.unique_consecutive((x[:, 0] > 0).int(), return_counts=True)  # expect: CG104|CG105
        return counts.sum() + values.sum()

    return step, _one


def factory_ok_nonzero_of_fixed_size():
    def step(x):
        rows = torch.nonzero_static(x[:, 0] > 0, size=4, fill_value=0)[:, 0]
        return x[rows]

    return step, _one


# transforms


def factory_ok_ensemble_by_vmap():
    models = [nn.Linear(WIDTH, WIDTH).to("cuda") for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)

    def one(parameters, buffers, x):
        return torch.func.functional_call(models[0], (parameters, buffers), (x,))

    @torch.no_grad()
    def step(x):
        return torch.func.vmap(one, in_dims=(0, 0, None))(parameters, buffers, x)

    return step, _one


def factory_ok_gradient_of_each_sample():
    layer = nn.Linear(WIDTH, 1).to("cuda")
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, row):
        return torch.func.functional_call(layer, parameters, (row,)).square().sum()

    def step(x):
        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        return grads["weight"].norm(dim=-1)

    return step, _one


def factory_ok_jacobian_forward_and_back():
    weight = _weight(4)

    def step(x):
        def f(row):
            return torch.tanh(row @ weight)

        rows = torch.func.vmap(torch.func.jacfwd(f))(x) - torch.func.vmap(torch.func.jacrev(f))(x)
        value, tangent = torch.func.jvp(f, (x,), (x.flip(0),))
        return rows, value, tangent, torch.func.hessian(lambda row: f(row).sum())(x[0])

    return step, _one


def factory_bad_reads_inside_of_a_gradient():  # hazard: 1
    def loss(x):
        value = x.square().sum()
        return value / value.detach().sqrt().item()  # expect: CG101

    return torch.func.grad(loss), _one


def factory_ok_scripted_step():
    @torch.jit.script
    def gelu(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / 1.41421))

    return (lambda x: gelu(x) + 1), _one


class Step:
    """A step that is an object, with its memory in buffers."""

    def __init__(self):
        self.memory, self.count = torch.zeros(6, WIDTH, device="cuda"), torch.zeros((), device="cuda")

    def __call__(self, x, scale=2.0):
        self.count += 1
        self.memory.mul_(1 - 1 / self.count).add_(x / self.count, alpha=scale)
        return self.memory.clone(), self.count.clone()


def factory_ok_step_is_an_object():
    return functools.partial(Step(), scale=1.5), _one


def factory_ok_writes_its_input():
    def step(x):
        x.mul_(2).add_(1)
        return x

    return step, _one
