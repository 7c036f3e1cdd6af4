"""Fourth held-out set: diffusion to video; frozen as one long file, because recorded findings name its lines."""

import math
import random
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 4


def _x(i, rows=6, columns=WIDTH):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 + i)).to("cuda")


def _one(i):
    return (_x(i),)


# diffusion


@dataclass
class Schedule:
    betas: list = field(default_factory=lambda: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    at: int = 0

    def next(self):
        beta = self.betas[self.at % len(self.betas)]
        self.at += 1  # expect: CG210 @noise_level_from_list
        return beta


def factory_bad_noise_level_from_list():  # hazard: 11
    schedule = Schedule()
    return (lambda x: x * math.sqrt(1 - schedule.next())), _one  # expect: CG202


def factory_ok_noise_level_by_index_tensor():
    levels = torch.linspace(0.1, 0.8, 8).to("cuda")
    return (lambda x, t: x * (1 - levels.gather(0, t)).sqrt()), lambda i: (_x(i), torch.tensor([i]).to("cuda"))


def factory_bad_time_embedding_made_on_cpu():  # hazard: 3
    def embed(t, width=4):
        rates = torch.exp(-torch.arange(width // 2) / width).to(t.device)  # expect: CG102
        return torch.cat([(t[:, None] * rates).sin(), (t[:, None] * rates).cos()], -1)

    return embed, lambda i: (torch.tensor([float(i)]).to("cuda"),)


def factory_ok_time_embedding_on_device():
    def embed(t, width=4):
        rates = torch.exp(-torch.arange(width // 2, device=t.device) / width)
        return torch.cat([(t[:, None] * rates).sin(), (t[:, None] * rates).cos()], -1)

    return embed, lambda i: (torch.tensor([float(i)]).to("cuda"),)


def factory_bad_dynamic_threshold():  # hazard: 1
    def step(x):
        limit = max(1.0, x.abs().quantile(0.9).item())  # expect: CG101
        return x.clamp(-limit, limit) / limit  # expect: CG202 optional

    return step, _one


def factory_ok_dynamic_threshold():
    def step(x):
        limit = x.abs().amax().clamp_min(1.0)
        return torch.minimum(torch.maximum(x, -limit), limit) / limit

    return step, _one


def factory_bad_guidance_only_sometimes():  # hazard: 10
    state = {"n": 0}

    def step(x):
        state["n"] += 1  # expect: CG210
        y = x.tanh()
        if state["n"] < 4:  # expect: CG201
            y = y + 2 * (x - y)  # expect: CG201 optional
        return y

    return step, _one


def factory_bad_previous_prediction():  # hazard: 14
    past = []

    def step(x):
        prediction = x.sin()
        past.append(prediction)  # expect: CG210 optional
        if len(past) > 2:
            past.pop(0)  # expect: CG210 optional
        return 1.5 * past[-1] - 0.5 * past[0]  # expect: CG205|CG206|CG209, CG201|CG202 optional

    return step, _one


def factory_ok_previous_prediction_in_buffer():
    past = torch.zeros(6, WIDTH, device="cuda")

    def step(x):
        prediction = x.sin()
        y = 1.5 * prediction - 0.5 * past
        past.copy_(prediction)
        return y

    return step, _one


# vector quantization, observers


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH))
        self.register_buffer("usage", torch.zeros(8))

    def nearest(self, x):
        return torch.cdist(x, self.codes).argmin(-1)


def factory_bad_restarts_dead_codes():  # hazard: 5
    quantizer = Quantizer().to("cuda")

    @torch.no_grad()
    def step(x):
        chosen = quantizer.nearest(x)
        quantizer.usage.lerp_(F.one_hot(chosen, 8).sum(0).float(), 0.5)
        dead = (quantizer.usage < 0.1).nonzero().flatten()  # expect: CG104
        quantizer.codes[dead] = x[0]
        return quantizer.codes[chosen]

    return step, _one


def factory_ok_restarts_dead_codes_by_where():
    quantizer = Quantizer().to("cuda")

    @torch.no_grad()
    def step(x):
        chosen = quantizer.nearest(x)
        counts = torch.zeros_like(quantizer.usage).scatter_add_(0, chosen, torch.ones(6, device=x.device))
        quantizer.usage.lerp_(counts, 0.5)
        quantizer.codes.copy_(torch.where((quantizer.usage < 0.1)[:, None], x[0], quantizer.codes))
        return quantizer.codes[chosen]

    return step, _one


def factory_bad_one_hot_without_width():  # hazard: 1
    quantizer = Quantizer().to("cuda")

    def step(x):
        return F.one_hot(quantizer.nearest(x)).float().sum(0).sum().view(1) * x  # expect: CG101|CG104|CG105

    return step, _one


class Observer:
    def __init__(self):
        self.low, self.high = float("inf"), float("-inf")

    def __call__(self, x):
        low, high = torch.aminmax(x)
        self.low = min(self.low, float(low))  # expect: CG101 @range_on_the_host, CG210 optional @range_on_the_host
        self.high = max(self.high, high.item())  # expect: CG101 @range_on_the_host, CG210 optional @range_on_the_host
        return (x - self.low) / (self.high - self.low)  # expect: CG202 optional @range_on_the_host


def factory_bad_range_on_the_host():  # hazard: 1
    observe = Observer()
    return (lambda x: observe(x)), _one


def factory_ok_range_on_device():
    low, high = torch.full((), 9.0).to("cuda"), torch.full((), -9.0).to("cuda")

    def step(x):
        low.copy_(torch.minimum(low, x.amin()))
        high.copy_(torch.maximum(high, x.amax()))
        return (x - low) / (high - low)

    return step, _one


def factory_bad_skips_empty_experts():  # hazard: 9
    weights = _x(50, 3 * WIDTH).view(3, WIDTH, WIDTH)

    def step(x, owner):
        out = torch.zeros_like(x)
        for k in range(3):
            mask = owner == k
            if not mask.any():  # expect: CG108
                continue
            out += (x @ weights[k]) * mask[:, None]  # expect: CG201 optional
        return out

    return step, lambda i: (_x(i), torch.tensor([0, 1, i % 3, 0, 1, i % 2]).to("cuda"))


def factory_ok_all_experts_masked():
    weights = _x(50, 3 * WIDTH).view(3, WIDTH, WIDTH)

    def step(x, owner):
        out = torch.zeros_like(x)
        for k in range(3):
            out += (x @ weights[k]) * (owner == k)[:, None]
        return out

    return step, lambda i: (_x(i), torch.tensor([0, 1, i % 3, 0, 1, i % 2]).to("cuda"))


def factory_bad_scale_list_from_parameters():  # hazard: 3
    scales = {"q": 1.0, "k": 0.5, "v": 0.25, "o": 2.0}

    def step(x):
        return x * x.new_tensor(list(scales.values()))  # expect: CG102

    return step, _one


def factory_bad_pruned_weight_reassigned():  # hazard: 14
    layer = nn.Linear(WIDTH, WIDTH).to("cuda")

    @torch.no_grad()
    def step(x):
        y = layer(x)  # expect: CG205|CG206
        layer.weight = nn.Parameter(layer.weight * 0.9)  # expect: CG205|CG206 optional
        return y

    return step, _one


# search and sequences


def factory_bad_beam_back_pointers():  # hazard: 2
    def step(scores):
        values, index = scores.flatten().topk(3)
        parents = [int(k) // WIDTH for k in index.tolist()]  # expect: CG101
        return scores[parents] + values[:, None]  # expect: CG103

    return step, _one


def factory_ok_beam_back_pointers():
    def step(scores):
        values, index = scores.flatten().topk(3)
        return scores.index_select(0, index // WIDTH) + values[:, None]

    return step, _one


def factory_ok_viterbi():
    moves = _x(60, WIDTH)

    def step(x):
        best = x[0]
        for row in x[1:]:
            best = (best[:, None] + moves).amax(0) + row
        return best

    return step, _one


def factory_bad_stops_at_end_token():  # hazard: 9
    def step(x):
        total = torch.zeros_like(x[0])
        for row in x:
            if row.argmax() == 0:  # expect: CG108
                break
            total = total + row  # expect: CG201 optional
        return total

    return step, _one


def factory_bad_lengths_to_mask_by_max():  # hazard: 1
    def mask(lengths):
        rows = torch.arange(lengths.max(), device=lengths.device)  # expect: CG101, CG202 optional
        return (rows[None] < lengths[:, None]).float().sum(-1)

    return mask, lambda i: (torch.tensor([2, 3, 4 + i]).to("cuda"),)


def factory_bad_splits_by_sizes():  # hazard: 2
    def step(x, sizes):
        parts = x.split(sizes.tolist())  # expect: CG101, CG202 optional
        return torch.stack([p.mean(0) for p in parts])  # expect: CG202 optional, CG208 optional

    return step, lambda i: (_x(i), torch.tensor([1 + i % 2, 5 - i % 2]).to("cuda"))


def factory_bad_repeats_by_duration():  # hazard: 5
    """The length regulator of a speech model."""

    def step(x, durations):
        return torch.repeat_interleave(x, durations, dim=0).mean(0)  # expect: CG104

    return step, lambda i: (_x(i), torch.tensor([1, 2, 1, 1 + i % 2, 1, 2]).to("cuda"))


def factory_ok_repeats_with_given_length():
    def step(x, durations):
        return torch.repeat_interleave(x, durations, dim=0, output_size=9).mean(0)

    return step, lambda i: (_x(i), torch.tensor([1, 2, 1 + i % 2, 2 - i % 2, 1, 2]).to("cuda"))


def factory_bad_position_given_as_int():  # hazard: 11
    table = _x(70, 16)
    return (lambda x, position: x + table[position]), lambda i: (_x(i), i + 1)  # expect: CG202


def factory_ok_position_given_as_tensor():
    table = _x(70, 16)
    return (lambda x, position: x + table[position]), lambda i: (_x(i), torch.tensor([i + 1]).to("cuda"))


def factory_bad_cache_grows_in_a_dict():  # hazard: 17
    cache = {}

    def step(x):
        cache["keys"] = x if "keys" not in cache else torch.cat([cache["keys"], x])  # expect: CG205|CG206|CG208|CG209
        return cache["keys"].mean(0)  # expect: CG208 optional, CG201 optional

    return step, _one


def factory_ok_scan_with_state():
    state, decay = torch.zeros(WIDTH, device="cuda"), torch.full((WIDTH,), 0.9).to("cuda")

    def step(x):
        h, out = state, []
        for row in x:
            h = decay * h + row
            out.append(h)
        state.copy_(h)
        return torch.stack(out)

    return step, _one


def factory_bad_scan_length_of_the_host():  # hazard: 10
    def step(x, count):
        h = torch.zeros_like(x[0])
        for k in range(count):  # expect: CG201
            h = 0.5 * h + x[k]
        return h

    return step, lambda i: (_x(i), 2 + i % 3)


# transport, statistics


def factory_ok_sinkhorn():
    def step(x):
        plan = (x - x.amax()).exp()
        for _ in range(5):
            plan = plan / plan.sum(0, keepdim=True)
            plan = plan / plan.sum(1, keepdim=True)
        return plan

    return step, _one


def factory_bad_sinkhorn_until_close():  # hazard: 9
    def step(x):
        plan = (x - x.amax()).exp()
        for _ in range(20):
            before = plan
            plan = plan / plan.sum(0, keepdim=True)  # expect: CG201 optional
            plan = plan / plan.sum(1, keepdim=True)
            if torch.allclose(plan, before, atol=1e-2):  # expect: CG101|CG105|CG108
                break
        return plan

    return step, _one


def factory_bad_least_squares():  # hazard: 6
    def step(x):
        return torch.linalg.solve(x.T @ x + torch.eye(WIDTH, device=x.device), x.T)  # expect: CG105

    return step, _one


def factory_ok_least_squares_unchecked():
    def step(x):
        return torch.linalg.solve_ex(x.T @ x + torch.eye(WIDTH, device=x.device), x.T).result

    return step, _one


def factory_bad_percentile_by_numpy():  # hazard: 2
    def step(x):
        limit = float(np.percentile(x.detach().cpu(), 75))  # expect: CG101
        return x.clamp_max(limit)  # expect: CG202 optional

    return step, _one


def factory_bad_counts_distinct():  # hazard: 5
    def step(x):
        seen = (x > 0).long().sum(-1).unique()  # expect: CG104
        return x * seen.numel()  # expect: CG202 optional

    return step, _one


def factory_bad_where_of_one_argument():  # hazard: 5
    def step(x):
        rows, columns = torch.where(x > 0.5)  # expect: CG104
        return torch.zeros_like(x).index_put((rows, columns), x[rows, columns])

    return step, _one


def factory_ok_where_of_three_arguments():
    return (lambda x: torch.where(x > 0.5, x, 0.0)), _one


def factory_bad_noise_from_python():  # hazard: 11
    draw = random.Random(4)
    return (lambda x: x + draw.gauss(0, 1)), _one  # expect: CG202


def factory_bad_noise_from_numpy():  # hazard: 3
    draw = np.random.default_rng(4)

    def step(x):
        noise = torch.as_tensor(draw.standard_normal(x.shape), dtype=x.dtype)
        return x + noise.to(x.device)  # expect: CG102

    return step, _one


def factory_ok_noise_of_torch():
    return (lambda x: x + torch.randn_like(x)), _one


def factory_ok_dropout():
    drop = nn.Dropout(0.5).to("cuda").train()
    return (lambda x: drop(x)), _one


# video, control


def factory_bad_frames_of_a_list():  # hazard: 14
    frames = [torch.zeros(6, WIDTH, device="cuda") for _ in range(3)]

    def step(x):
        frames.pop(0)
        frames.append(x.clone())
        return torch.stack(frames).mean(0)  # expect: CG205|CG206|CG209

    return step, _one


def factory_ok_frames_of_a_buffer():
    frames = torch.zeros(3, 6, WIDTH, device="cuda")

    def step(x):
        frames.copy_(torch.cat([frames[1:], x[None]]))
        return frames.mean(0)

    return step, _one


def factory_bad_key_frame_every_third():  # hazard: 10
    kept = torch.zeros(6, WIDTH, device="cuda")
    state = {"frame": 0}

    def step(x):
        if state["frame"] % 3 == 0:  # expect: CG201
            kept.copy_(x)  # expect: CG201 optional
        state["frame"] += 1  # expect: CG210
        return x - kept

    return step, _one


def factory_bad_scene_cut():  # hazard: 9
    last = torch.zeros(6, WIDTH, device="cuda")

    def step(x):
        cut = (x - last).abs().mean() > 1.2
        last.copy_(x)
        return torch.zeros_like(x) if cut else x  # expect: CG108

    return step, _one


def factory_bad_waits_for_an_event():  # hazard: 7
    done = torch.cuda.Event()

    def step(x):
        y = x * 2
        done.record()
        while not done.query():  # expect: CG107
            pass
        return y

    return step, _one


def factory_bad_asks_the_stream():  # hazard: 7
    def step(x):
        y = x * 2
        torch.cuda.current_stream().synchronize()  # expect: CG106
        return y + 1

    return step, _one


def factory_bad_gain_on_the_cpu():  # hazard: 12
    gain = torch.tensor(2.0)

    def step(x):
        y = x * gain  # expect: CG203
        gain.add_(1)  # expect: CG210 optional
        return y

    return step, _one


def factory_bad_shows_progress():  # hazard: 2
    def step(x):
        loss = x.pow(2).mean()
        print("loss", loss)  # expect: CG101, CG210 optional
        return loss

    return step, _one


def factory_bad_compares_with_a_list():  # hazard: 1
    seen = []

    def step(x):
        best = x.argmax().item()  # expect: CG101
        if best in seen:  # expect: CG201 optional
            return x * 0  # expect: CG201 optional
        seen.append(best)  # expect: CG210 optional
        return x + best  # expect: CG201 optional, CG202 optional

    return step, _one


def factory_ok_controller_with_integral():
    integral = torch.zeros(6, WIDTH, device="cuda")

    def step(error):
        integral.mul_(0.9).add_(error).clamp_(-2, 2)
        return 0.5 * error + 0.1 * integral

    return step, _one


def factory_ok_grid_of_images():
    def step(x):
        grid = F.affine_grid(x[:1, :3].repeat(2, 1)[None], (1, 1, 4, 4), align_corners=False)
        return F.grid_sample(x[None, None], grid, align_corners=False)

    return step, _one


def factory_ok_linear_attention():
    memory = torch.zeros(WIDTH, WIDTH, device="cuda")

    def step(x):
        q, k = F.elu(x) + 1, F.elu(-x) + 1
        memory.addmm_(k.T, x)
        return (q @ memory) / (q.sum(-1, keepdim=True) + 1e-6)

    return step, _one


def factory_ok_view_turned_in_place():
    def step(x):
        y = x.clone()
        y.t_()
        y.unsqueeze_(0)
        return y.softmax(-1).squeeze_(0) * 2

    return step, _one


def factory_ok_lstm_cell():
    cell = nn.LSTMCell(WIDTH, WIDTH).to("cuda")
    h, c = torch.zeros(6, WIDTH, device="cuda"), torch.zeros(6, WIDTH, device="cuda")

    @torch.no_grad()
    def step(x):
        for state, fresh in zip((h, c), cell(x, (h, c)), strict=True):
            state.copy_(fresh)
        return h.clone()

    return step, _one


def factory_ok_instance_norm():
    norm = nn.InstanceNorm1d(6, track_running_stats=True).to("cuda").train()

    @torch.no_grad()
    def step(x):
        return norm(x[None]) + norm.running_mean[:, None]

    return step, _one
