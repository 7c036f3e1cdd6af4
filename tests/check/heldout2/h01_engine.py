"""Second held-out set: what engines do around the model, and model code that was not written with graphs in mind."""

import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8


def _x(i, rows=4):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(i)).to("cuda")


def _lengths(i):
    return torch.tensor([1 + i % 2, 3 - i % 2], device="cuda")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x)))


@dataclass
class Batch:
    ids: np.ndarray
    count: int


def factory_bad_ids_from_numpy():  # hazard: 3
    table = _x(1, 16)
    batch = Batch(np.arange(6), 4)

    def prepare(batch):
        return torch.from_numpy(batch.ids[: batch.count]).to("cuda", non_blocking=True)  # expect: CG102

    return (lambda x: table[prepare(batch)] + x), lambda i: (_x(i),)


def factory_bad_pinned_mirror_filled_in_step():  # hazard: 13
    """A pinned mirror of a device buffer, filled by the host inside the step and sent over."""

    class Mirror:
        def __init__(self, size):
            self.cpu = torch.zeros(size).pin_memory()
            self.gpu = torch.zeros(size, device="cuda")
            self.np = self.cpu.numpy()
            self.step = 0

        def fill(self):
            self.step += 1  # expect: CG210
            self.np[:] = self.step
            self.gpu.copy_(self.cpu, non_blocking=True)  # expect: CG204
            return self.gpu

    mirror = Mirror(WIDTH)
    return (lambda x: x + mirror.fill()), lambda i: (_x(i),)


def factory_quiet_splits_by_length():
    """The number of splits follows a host length; the sum is the same."""
    keys = _x(5, 8)

    def step(x, length):
        splits = 1 if length < 4 else 2  # expect: CG201 optional
        parts = [keys.chunk(splits)[i].sum(0) for i in range(splits)]  # expect: CG201 optional
        return x + sum(parts)  # expect: CG201 optional

    return step, lambda i: (_x(i), 2 + i)


def factory_bad_longest_query():  # hazard: 1
    def metadata(lengths):
        starts = F.pad(lengths.cumsum(0), (1, 0))
        return starts, lengths.max().item()  # expect: CG101

    def step(x, lengths):
        starts, longest = metadata(lengths)
        return x[starts[:-1]] * longest  # expect: CG202 optional

    return step, lambda i: (_x(i), _lengths(i))


def factory_bad_mask_shortcut():  # hazard: 9
    """The attention mask is dropped where it masks nothing."""

    def prepare(mask):
        if mask is not None and torch.all(mask == 1):  # expect: CG108
            return None
        return mask

    def step(x, mask):
        mask = prepare(mask)
        scores = x @ x.T
        if mask is not None:  # expect: CG201 optional
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return scores.softmax(-1)

    return step, lambda i: (_x(i), (torch.arange(4, device="cuda") <= i + 1).long())


def factory_bad_image_rows_by_mask():  # hazard: 5
    features = _x(7, 2)

    def step(x, tokens):
        x = x.clone()
        x[tokens == 9] = features  # expect: CG104
        return x

    return step, lambda i: (_x(i), torch.tensor([9, i % 8, 9, 1], device="cuda"))


def factory_ok_image_rows_masked_scatter():
    features = _x(7, 2)

    def step(x, tokens):
        mask = (tokens == 9).unsqueeze(-1).expand_as(x)
        return x.masked_scatter(mask, features)

    return step, lambda i: (_x(i), torch.tensor([9, i % 8, 9, 1], device="cuda"))


def factory_bad_prefetch_without_join():  # hazard: 25
    side = torch.cuda.Stream()
    staging, weight = torch.zeros(WIDTH, device="cuda"), torch.ones(WIDTH, device="cuda")

    def step(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            staging.copy_(weight * 2)  # expect: CG305
        return x * 2

    return step, lambda i: (_x(i),)


def factory_ok_shared_expert_on_a_side_stream():
    side = torch.cuda.Stream()
    torch.manual_seed(0)
    first, second = Block().to("cuda"), Block().to("cuda")

    @torch.no_grad()
    def step(x):
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            shared = second(x)
        routed = first(x)
        current.wait_stream(side)
        return routed + shared

    return step, lambda i: (_x(i),)


def factory_bad_profiled_layer():  # hazard: 7
    torch.manual_seed(0)
    block = Block().to("cuda")

    class Profiled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            torch.cuda.synchronize()  # expect: CG106
            return self.inner(x)

    profiled = Profiled(block)
    return torch.no_grad()(lambda x: profiled(x)), lambda i: (_x(i),)


def factory_ok_profiler_ranges():
    torch.manual_seed(0)
    block = Block().to("cuda")

    @torch.no_grad()
    def step(x):
        with torch.profiler.record_function("block"):
            return block(x)

    return step, lambda i: (_x(i),)


def factory_bad_early_exit():  # hazard: 9
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(3)).to("cuda")
    head = nn.Linear(WIDTH, 4).to("cuda")

    @torch.no_grad()
    def step(x):
        for block in blocks:
            x = block(x)
            if head(x).softmax(-1).max() > 0.5:  # expect: CG108
                break
        return x

    return step, lambda i: (_x(i) * (i + 1),)


def factory_bad_stochastic_depth():  # hazard: 10
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(3)).to("cuda")
    dice = random.Random(5)

    @torch.no_grad()
    def step(x):
        for block in blocks:
            if dice.random() < 0.4:  # expect: CG201
                continue
            x = block(x)
        return x

    return step, lambda i: (_x(i),)


def factory_bad_depth_ratio():  # hazard: 1
    """Mixture of depths: how many tokens a block takes follows from the mask."""

    def step(x, mask):
        count = max(1, int(0.5 * mask.sum()))  # expect: CG101
        best = x.norm(dim=-1).topk(count).indices  # expect: CG202|CG208 optional
        return x.index_fill(0, best, 0.0)  # expect: CG208 optional

    return step, lambda i: (_x(i), torch.arange(4, device="cuda") <= i)


def factory_bad_split_by_lengths():  # hazard: 2
    def step(x, lengths):
        parts = x.split(lengths.tolist())  # expect: CG101
        return torch.stack([part.mean(0) for part in parts])  # expect: CG208 optional, CG202 optional

    return step, lambda i: (_x(i), _lengths(i))


def factory_bad_repeat_by_lengths():  # hazard: 5
    def step(x, lengths):
        return x[:2].repeat_interleave(lengths, dim=0)  # expect: CG104

    return step, lambda i: (_x(i), _lengths(i))


def factory_ok_repeat_with_size():
    def step(x, lengths):
        return torch.repeat_interleave(x[:2], lengths, dim=0, output_size=4)

    return step, lambda i: (_x(i), _lengths(i))


def factory_bad_two_steps_averaged():  # hazard: 14
    class Smoother:
        previous = None

        def __call__(self, out):
            smoothed = out if self.previous is None else 0.5 * (out + self.previous)  # expect: CG205|CG206|CG209
            self.previous = out  # expect: CG205 optional
            return smoothed

    smoother = Smoother()
    return (lambda x: smoother(x * 2)), lambda i: (_x(i),)


def factory_bad_stop_list_each_step():  # hazard: 3
    stop = [2, 5]

    def step(tokens):
        return torch.isin(tokens, torch.tensor(stop, device=tokens.device))  # expect: CG102

    return step, lambda i: (torch.tensor([i, 2], device="cuda"),)


def factory_bad_host_schedule():  # hazard: 11
    """Diffusion-like: sigma of the step from a Python list."""
    sigmas = np.linspace(1.0, 0.1, 10)

    class Sampler:
        def __init__(self):
            self.index = 0

        def step(self, x):
            sigma = float(sigmas[self.index])
            self.index += 1  # expect: CG210
            return x - 0.5 * sigma * torch.tanh(x)  # expect: CG202

    sampler = Sampler()
    return (lambda x: sampler.step(x)), lambda i: (_x(i),)


def factory_bad_schedule_by_device_index():  # hazard: 1
    sigmas = torch.linspace(1.0, 0.1, 10, device="cuda")
    index = torch.zeros((), dtype=torch.long, device="cuda")

    def step(x):
        out = x - 0.5 * sigmas[index] * torch.tanh(x)  # expect: CG101
        index.add_(1)
        return out

    return step, lambda i: (_x(i),)


def factory_bad_cpu_offload():  # hazard: 2
    """A residual parked on the host between two layers."""
    torch.manual_seed(0)
    first, second = Block().to("cuda"), Block().to("cuda")

    @torch.no_grad()
    def step(x):
        parked = x.to("cpu")  # expect: CG101
        y = second(first(x))
        return y + parked.to("cuda")  # expect: CG102 optional

    return step, lambda i: (_x(i),)


def factory_bad_gate_of_the_host():  # hazard: 10
    """A feature that a config object switches while serving."""

    @dataclass
    class Config:
        use_bias: bool = False

    config, bias = Config(), torch.ones(WIDTH, device="cuda")

    def step(x):
        if config.use_bias:  # expect: CG201
            x = x + bias
        return x * 2

    def inputs(i):
        config.use_bias = i >= 3
        return (_x(i),)

    return step, inputs


def factory_ok_block_of_constants():
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(2)).to("cuda")

    @torch.inference_mode()
    def step(x):
        mask = torch.full((4, 4), float("-inf"), device=x.device).triu(1)
        for number, block in enumerate(blocks):
            x = block(x) * (0.5 if number == 0 else 1.0)
        return torch.nan_to_num((x @ x.T + mask).softmax(-1)), torch.where(x.isnan(), 0.0, x)

    return step, lambda i: (_x(i),)


def factory_ok_packed_lengths():
    def step(x, lengths):
        ends = lengths.cumsum(0)
        owner = torch.searchsorted(ends, torch.arange(4, device="cuda"), right=True).clamp_max(1)
        return torch.zeros(2, WIDTH, device="cuda").index_add_(0, owner, x)

    return step, lambda i: (_x(i), _lengths(i))


def factory_ok_weights_given_as_inputs():
    """A dictionary of tensors is an input as any other."""

    def step(batch):
        return batch["x"] * batch["scale"].unsqueeze(-1)

    return step, lambda i: ({"x": _x(i), "scale": torch.full((4,), 1.0 + i, device="cuda")},)
