"""Third held-out set: graphs, audio, control; frozen as one long file, because truth.json names its lines."""

import functools
import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

NODES = 5


def _x(i, rows=NODES, columns=4):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(i)).to("cuda")


def _edges(i):
    return torch.tensor([[0, 1, 2, 3, 4, i % 5], [1, 2, 3, 4, 0, (2 * i + 3) % 5]]).to("cuda")


def _graph(i):
    return _x(i), _edges(i)


# graphs


def factory_bad_counts_nodes():  # hazard: 1
    def convolve(x, edges):
        nodes = int(edges.max()) + 1  # expect: CG101
        out = torch.zeros(nodes, x.shape[1], device=x.device)  # expect: CG202 optional, CG208 optional
        return out.index_add_(0, edges[1], x[edges[0]]).sum(0)

    return convolve, _graph


def factory_ok_convolves_fixed_nodes():
    def convolve(x, edges):
        out = torch.zeros_like(x)
        return out.index_add_(0, edges[1], x.index_select(0, edges[0]))

    return convolve, _graph


def factory_bad_degree_by_bincount():  # hazard: 5
    def step(x, edges):
        degree = torch.bincount(edges[1], minlength=x.shape[0]).clamp_min(1)  # expect: CG104
        return x / degree[:, None]

    return step, _graph


def factory_ok_degree_by_scatter():
    def step(x, edges):
        degree = torch.zeros(x.shape[0], device=x.device).scatter_add_(0, edges[1], torch.ones_like(edges[1]).float())
        return x / degree.clamp_min(1)[:, None]

    return step, _graph


def factory_bad_removes_self_loops():  # hazard: 5
    def step(x, edges):
        edges = edges[:, edges[0] != edges[1]]  # expect: CG104
        return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])

    return step, _graph


def factory_bad_samples_neighbours():  # hazard: 4
    draw = random.Random(0)

    def step(x):
        rows = draw.sample(range(NODES), 2)
        return x[rows].sum(0)  # expect: CG103

    return step, lambda i: (_x(i),)


def factory_bad_relabels_nodes():  # hazard: 5
    def step(x, edges):
        seen, renamed = torch.unique(edges, return_inverse=True)  # expect: CG104
        return x[seen].sum(0) + renamed.float().mean()

    return step, _graph


def factory_ok_pools_by_graph():
    owner = torch.tensor([0, 0, 1, 1, 1]).to("cuda")

    def step(x):
        out = torch.full((2, x.shape[1]), float("-inf"), device=x.device)
        return out.scatter_reduce_(0, owner[:, None].expand_as(x), x, "amax")

    return step, lambda i: (_x(i),)


# physics


def _force(x):
    return -x + 0.1 * x.pow(3)


def factory_bad_adaptive_step():  # hazard: 9
    def integrate(x):
        h = 0.5
        for _ in range(6):
            once = x + h * _force(x)
            half = x + h / 2 * _force(x)
            twice = half + h / 2 * _force(half)
            if (once - twice).abs().max() > 0.01:  # expect: CG108
                h *= 0.5
            else:
                x = twice  # expect: CG201 optional
        return x

    return integrate, lambda i: (_x(i),)


def factory_ok_fixed_steps():
    def integrate(x):
        for _ in range(4):
            k = _force(x)
            x = x + 0.05 * (k + _force(x + 0.1 * k))
        return x

    return integrate, lambda i: (_x(i),)


class Clock:
    def __init__(self):
        self.now = 0.0

    def tick(self, by):
        self.now += by  # expect: CG210 @time_is_a_float
        return self.now


def factory_bad_time_is_a_float():  # hazard: 11
    clock = Clock()

    def step(x):
        return x + torch.sin(x + clock.tick(0.3))  # expect: CG202

    return step, lambda i: (_x(i),)


def factory_ok_time_is_a_tensor():
    now = torch.zeros((), device="cuda")

    def step(x):
        now.add_(0.3)
        return x + torch.sin(x + now)

    return step, lambda i: (_x(i),)


def factory_bad_stops_when_converged():  # hazard: 9
    matrix = (torch.eye(4) * 4 + 0.3).to("cuda")

    def jacobi(b):
        x, diagonal = torch.zeros_like(b), matrix.diagonal()
        for k in range(12):
            residual = b - x @ matrix
            if k % 3 == 0 and residual.norm() < 1e-2:  # expect: CG108
                break
            x = x + residual / diagonal  # expect: CG201 optional
        return x

    return jacobi, lambda i: (_x(i) * 10.0 ** (i - 2),)


def factory_ok_iterates_a_fixed_time():
    matrix = (torch.eye(4) * 4 + 0.3).to("cuda")

    def jacobi(b):
        x, diagonal = torch.zeros_like(b), matrix.diagonal()
        for _ in range(6):
            x = x + (b - x @ matrix) / diagonal
        return x

    return jacobi, lambda i: (_x(i),)


def factory_bad_lists_near_pairs():  # hazard: 5
    def step(x):
        distance = torch.cdist(x, x)
        first, second = (distance < 2.5).nonzero(as_tuple=True)  # expect: CG104
        return torch.zeros_like(x).index_add_(0, first, x[second])

    return step, lambda i: (_x(i),)


def factory_ok_masks_far_pairs():
    def step(x):
        near = (torch.cdist(x, x) < 2.5).to(x.dtype)
        return near @ x

    return step, lambda i: (_x(i),)


def factory_bad_collides_pair_by_pair():  # hazard: 2
    def step(x, edges):
        x = x.clone()
        for a, b in edges.T.tolist():  # expect: CG101
            x[a] += 0.1 * x[b]  # expect: CG202 optional
        return x

    return step, _graph


def factory_bad_inverse():  # hazard: 6
    def step(x):
        gram = x.T @ x + torch.eye(4, device=x.device)
        return torch.linalg.inv(gram)  # expect: CG105

    return step, lambda i: (_x(i),)


def factory_ok_inverse_unchecked():
    def step(x):
        gram = x.T @ x + torch.eye(4, device=x.device)
        return torch.linalg.inv_ex(gram).inverse

    return step, lambda i: (_x(i),)


def factory_bad_pseudo_inverse_by_numpy():  # hazard: 2
    def step(x):
        inverse = np.linalg.pinv(x.cpu().numpy())  # expect: CG101
        return x @ torch.from_numpy(inverse).to(x.device)  # expect: CG102

    return step, lambda i: (_x(i),)


def factory_bad_gate_of_the_filter():  # hazard: 1
    """A Kalman filter that leaves out measurements too far off."""
    mean, precision = torch.zeros(4, device="cuda"), torch.eye(4).to("cuda")

    def step(z):
        residual = z - mean
        distance = float(residual @ precision @ residual)  # expect: CG101
        if distance < 9.0:  # expect: CG201 optional
            mean.add_(0.3 * residual)  # expect: CG201 optional
        return mean.clone()

    return step, lambda i: (_x(i, 1)[0],)


def factory_bad_side_stream_left_alone():  # hazard: 25
    side = torch.cuda.Stream()

    def step(x):
        with torch.cuda.stream(side):
            y = x * 2  # expect: CG303|CG305
        return y + x  # expect: CG303|CG305 optional

    return step, lambda i: (_x(i),)


def factory_ok_side_stream_joined():
    side = torch.cuda.Stream()

    def step(x):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x * 2
        z = x + 1
        main.wait_stream(side)
        return y + z

    return step, lambda i: (_x(i),)


# audio


class Ring:
    def __init__(self, size):
        self.data = torch.zeros(size, device="cuda")
        self.at = 0

    def push(self, chunk):
        end = self.at + chunk.shape[0]
        self.data[self.at : end] = chunk  # expect: CG202 @ring_at_host_position
        self.at = end % self.data.shape[0]  # expect: CG210 @ring_at_host_position
        return self.data


def factory_bad_ring_at_host_position():  # hazard: 11
    ring = Ring(8)
    return (lambda x: ring.push(x).cumsum(0)), lambda i: (_x(i, 1, 4)[0],)


def factory_ok_ring_rolls():
    data = torch.zeros(8, device="cuda")

    def step(x):
        data.copy_(data.roll(-4))
        data[-4:] = x
        return data.cumsum(0)

    return step, lambda i: (_x(i, 1, 4)[0],)


def factory_bad_window_of_the_host():  # hazard: 3
    def spectrum(x):
        window = torch.hann_window(8).to(x.device)  # expect: CG102
        return torch.stft(x, 8, 4, window=window, return_complex=True).abs()

    return spectrum, lambda i: (_x(i, 1, 32)[0],)


def factory_ok_window_on_device():
    window = torch.hann_window(8, device="cuda")

    def spectrum(x):
        return torch.stft(x, 8, 4, window=window, return_complex=True).abs()

    return spectrum, lambda i: (_x(i, 1, 32)[0],)


def factory_ok_filters_by_fft():
    def step(x):
        bins = torch.fft.rfft(x)
        keep = torch.arange(bins.shape[-1], device=x.device) < 6
        return torch.fft.irfft(bins * keep, n=x.shape[-1])

    return step, lambda i: (_x(i, 2, 32),)


def factory_bad_silence_is_skipped():  # hazard: 9
    def step(x):
        if x.abs().amax() < 1.5:  # expect: CG108
            return torch.zeros_like(x)
        return x * 2

    return step, lambda i: (_x(i, 1, 4) * (1 + i % 2),)


def factory_ok_causal_convolution():
    convolve, past = nn.Conv1d(2, 2, 3).to("cuda"), torch.zeros(1, 2, 2, device="cuda")

    @torch.no_grad()
    def step(x):
        window = torch.cat([past, x], -1)
        past.copy_(window[..., -2:])
        return convolve(window)

    return step, lambda i: (_x(i, 2, 4)[None],)


def factory_ok_recurrent_cell():
    cell, hidden = nn.GRUCell(4, 4).to("cuda"), torch.zeros(NODES, 4, device="cuda")

    @torch.no_grad()
    def step(x):
        hidden.copy_(cell(x, hidden))
        return hidden.clone()

    return step, lambda i: (_x(i),)


def factory_bad_keeps_hidden_state():  # hazard: 14
    cell, state = nn.GRUCell(4, 4).to("cuda"), {"hidden": torch.zeros(NODES, 4, device="cuda")}

    @torch.no_grad()
    def step(x):
        state["hidden"] = cell(x, state["hidden"])  # expect: CG205|CG206|CG209
        return state["hidden"] * 1.0

    return step, lambda i: (_x(i),)


def factory_bad_packs_sequences():  # hazard: 2
    network = nn.GRU(4, 4, batch_first=True).to("cuda")

    @torch.no_grad()
    def step(x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), True, False)  # expect: CG101, CG102 optional
        return network(packed)[1]  # expect: CG102 optional, CG202 optional, CG208 optional

    return step, lambda i: (torch.stack([_x(i), _x(i + 9)]), torch.tensor([5, 2 + i % 3]).to("cuda"))


# control, recommendation


def factory_bad_moves_at_random():  # hazard: 10
    draw = random.Random(3)

    def step(values):
        if draw.random() < 0.5:  # expect: CG201
            return values * 0 + draw.randrange(4)  # expect: CG201 optional, CG202 optional
        return values.argmax(-1, keepdim=True).float().expand_as(values)  # expect: CG201 optional

    return step, lambda i: (_x(i),)


def factory_bad_replays_numpy_rows():  # hazard: 4
    memory, draw = _x(77, 16), np.random.default_rng(1)

    def step(x):
        rows = torch.from_numpy(draw.integers(0, 16, 5))
        return memory[rows] + x  # expect: CG103

    return step, lambda i: (_x(i),)


def factory_ok_replays_given_rows():
    memory = _x(77, 16)
    return (lambda x, rows: memory[rows] + x), lambda i: (_x(i), torch.arange(5).add(i).to("cuda"))


def factory_bad_resets_finished():  # hazard: 9
    state = torch.zeros(NODES, 4, device="cuda")

    def step(x):
        state.add_(x)
        done = state.abs().amax(-1) > 2
        if done.any():  # expect: CG108
            state[done] = 0.0  # expect: CG104 optional, CG201 optional, CG108 optional
        return state.clone()

    return step, lambda i: (_x(i),)


def factory_ok_resets_by_mask():
    state = torch.zeros(NODES, 4, device="cuda")

    def step(x):
        state.add_(x)
        state.mul_((state.abs().amax(-1, keepdim=True) <= 2).float())
        return state.clone()

    return step, lambda i: (_x(i),)


def factory_bad_bag_offsets_from_list():  # hazard: 3
    table = nn.EmbeddingBag(10, 4, mode="sum").to("cuda")

    @torch.no_grad()
    def step(ids):
        return table(ids, torch.tensor([0, 2, 3], device=ids.device))  # expect: CG102

    return step, lambda i: (torch.arange(5).add(i).to("cuda"),)


def factory_ok_bag_with_fixed_offsets():
    table, offsets = nn.EmbeddingBag(10, 4, mode="sum").to("cuda"), torch.tensor([0, 2, 3]).to("cuda")

    @torch.no_grad()
    def step(ids):
        return table(ids, offsets)

    return step, lambda i: (torch.arange(5).add(i).to("cuda"),)


def factory_bad_best_k_of_the_day():  # hazard: 1
    def step(x, k):
        best = x.flatten().topk(int(k)).values  # expect: CG101, CG202 optional
        return best.sum().view(1)

    return step, lambda i: (_x(i), torch.tensor(3 + i % 2).to("cuda"))


def factory_bad_average_of_a_deque():  # hazard: 14
    seen = deque(maxlen=3)

    def step(x):
        seen.append(x * 1.0)  # expect: CG210 optional
        return torch.stack(list(seen)).mean(0)  # expect: CG205|CG206|CG208|CG209

    return step, lambda i: (_x(i),)


def factory_ok_average_of_a_buffer():
    seen = torch.zeros(3, NODES, 4, device="cuda")

    def step(x):
        seen.copy_(seen.roll(1, 0))
        seen[0].copy_(x)
        return seen.mean(0)

    return step, lambda i: (_x(i),)


def factory_bad_noise_of_its_own_generator():  # hazard: 21
    draw = torch.Generator(device="cuda")
    draw.manual_seed(5)

    def step(x):
        return x + torch.randn(x.shape, generator=draw, device=x.device)  # expect: CG301

    return step, lambda i: (_x(i),)


def factory_bad_times_itself():  # hazard: 7
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []

    def step(x):
        start.record()
        y = x @ x.T
        end.record()
        end.synchronize()  # expect: CG106
        times.append(start.elapsed_time(end))  # expect: CG107 optional, CG210 optional
        return y

    return step, lambda i: (_x(i),)


@functools.lru_cache
def _mask(length):
    return torch.arange(4).lt(length).float().to("cuda")  # expect: CG102 @mask_by_host_length


def factory_bad_mask_by_host_length():  # hazard: 10
    """A mask is kept for each length; a new length makes one."""

    def step(x, length):
        return x * _mask(length)  # expect: CG205|CG201|CG202 optional

    return step, lambda i: (_x(i), 1 + i % 4)


def factory_bad_shift_by_host_number():  # hazard: 11
    def step(x, shift):
        return torch.roll(x, shift, 1)  # expect: CG202

    return step, lambda i: (_x(i), i)


def factory_ok_host_flag():
    def step(x, causal):
        scores = x @ x.T
        if causal:
            scores = scores.tril()
        return scores

    return step, lambda i: (_x(i), True)


def factory_quiet_table_made_at_first_call():
    table = {}

    def step(x):
        if "angles" not in table:
            table["angles"] = torch.arange(4).float().to("cuda")
        return x * table["angles"].cos()

    return step, lambda i: (_x(i),)


def factory_ok_state_is_written_back():
    state = torch.zeros(NODES, 4, device="cuda")

    def step(x):
        fresh = torch.tanh(x + state)
        state.copy_(fresh)
        return fresh * 2

    return step, lambda i: (_x(i),)


def factory_bad_last_result_is_kept():  # hazard: 18
    class Smoother:
        def __init__(self):
            self.last = torch.zeros(NODES, 4, device="cuda")

        def __call__(self, x):
            y = 0.5 * x + 0.5 * self.last  # expect: CG205|CG206|CG209
            self.last = y
            return y.abs()

    return Smoother(), lambda i: (_x(i),)


def factory_ok_huber_without_a_branch():
    def step(x):
        size = x.abs()
        return torch.where(size < 1, 0.5 * x * x, size - 0.5).mean(0) + F.huber_loss(x, x * 0.5, reduction="none").sum()

    return step, lambda i: (_x(i),)
