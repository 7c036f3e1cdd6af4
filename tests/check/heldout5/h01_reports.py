"""Fifth held-out set: patterns of public reports and pull requests about CUDA graphs, each rebuilt in a few lines.

The report stands above its cases. Frozen as one long file, because recorded findings name its lines.
"""

import logging
import random
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal
from torch.utils.checkpoint import checkpoint

WIDTH = 4


def _x(i, rows=6, columns=WIDTH):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(2000 + i)).to("cuda")


def _one(i):
    return (_x(i),)


# pytorch#114844: an activation kept on the module


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept = None

    def forward(self, x):
        hidden = self.first(x)
        self.kept = hidden
        return self.second(hidden)


def factory_quiet_keeps_an_activation():  # hazard: 14
    model = Keeps().to("cuda")
    return torch.no_grad()(lambda x: model(x)), _one


def factory_bad_adds_the_kept_activation():  # hazard: 14
    model = Keeps().to("cuda")

    @torch.no_grad()
    def step(x):
        before = model.kept
        y = model(x)
        return y if before is None else y + before  # expect: CG205|CG206|CG209, CG201 optional

    return step, _one


def factory_ok_adds_a_copy_of_the_activation():
    model = Keeps().to("cuda")
    before = torch.zeros(6, WIDTH, device="cuda")

    @torch.no_grad()
    def step(x):
        y = model(x) + before
        before.copy_(model.kept)
        return y

    return step, _one


# vllm-omni#4562: rows of the requests that decode, by a mask


def _spans(i):
    return torch.tensor([1, 2, 1, 1 + i % 2, 1, 3]).to("cuda"), torch.tensor([0, 1, 3, -1, 5, i % 3]).to("cuda")


def factory_bad_rows_that_decode():  # hazard: 5
    def step(x, spans, starts):
        decodes = (spans == 1) & (starts >= 0)
        rows = torch.arange(len(spans), device=spans.device)[decodes]  # expect: CG104
        return x.index_fill(0, rows, 0.0)  # expect: CG208 optional

    return step, lambda i: (_x(i), *_spans(i))


def factory_ok_rows_that_decode_by_where():
    def step(x, spans, starts):
        decodes = (spans == 1) & (starts >= 0)
        return torch.where(decodes[:, None], 0.0, x)

    return step, lambda i: (_x(i), *_spans(i))


# torchmd-net#194: forces of the pairs within the cutoff


def _pairs(i):
    generator = torch.Generator().manual_seed(i)
    return _x(i, 8), torch.randint(0, 6, (2, 8), generator=generator).to("cuda")


def factory_bad_adds_pairs_by_mask():  # hazard: 5
    def step(force, pairs):
        total = torch.zeros(6, WIDTH, device=force.device)
        near = force.norm(dim=-1) < 2
        total.index_add_(0, pairs[0, near], force[near])  # expect: CG104, CG208 optional
        return total

    return step, _pairs


def factory_ok_adds_far_pairs_to_a_spare_row():
    def step(force, pairs):
        total = torch.zeros(7, WIDTH, device=force.device)
        far = force.norm(dim=-1) >= 2
        total.index_add_(0, pairs[0].masked_fill(far, 6), force)
        return total[:6]

    return step, _pairs


# pytorch#130078: isin sorts where there is much to look for


def _ids(i, n):
    generator = torch.Generator().manual_seed(i)
    return (torch.randint(0, 100, (n,), generator=generator).to("cuda"),)


def factory_bad_isin_of_many():  # hazard: 6
    stop = torch.arange(0, 100, 2).to("cuda")
    return (lambda ids: torch.isin(ids, stop)), lambda i: _ids(i, 64)  # expect: CG104|CG105


def factory_ok_isin_of_few():
    stop = torch.tensor([3, 14, 15]).to("cuda")
    return (lambda ids: torch.isin(ids, stop)), lambda i: _ids(i, 64)


def factory_ok_isin_by_comparing():
    stop = torch.arange(0, 100, 2).to("cuda")
    return (lambda ids: (ids[:, None] == stop).any(-1)), lambda i: _ids(i, 64)


# deepmd-kit#5432: a constant made on every call


def factory_bad_makes_zero_on_every_call():  # hazard: 3
    def step(neighbours):
        masked = neighbours < 50
        neighbours = neighbours.clone()
        neighbours[masked] = torch.tensor(0, dtype=int, device=neighbours.device)  # expect: CG102, CG104 optional
        return neighbours

    return step, lambda i: _ids(i, 12)


def factory_ok_assigns_a_number_by_mask():
    def step(neighbours):
        masked = neighbours < 50
        neighbours = neighbours.clone()
        neighbours[masked] = 0
        return neighbours

    return step, lambda i: _ids(i, 12)


def factory_ok_assigns_a_made_zero():
    def step(neighbours):
        return torch.where(neighbours < 50, neighbours.new_zeros(()), neighbours)

    return step, lambda i: _ids(i, 12)


# diffusers#9485, #9417, LightX2V#1131: where the sampler stands


def factory_bad_table_on_cpu_by_device_time():  # hazard: 1
    table = torch.linspace(0.9, 0.1, 8)

    def step(x, t):
        level = table[t]  # expect: CG101
        return x * level.sqrt()  # expect: CG203 optional, CG202 optional

    return step, lambda i: (_x(i), torch.tensor(i % 8).to("cuda"))


def factory_bad_finds_its_step():  # hazard: 5
    times = torch.linspace(1.0, 0.0, 8).to("cuda")

    def step(x, t):
        found = (times == t).nonzero()  # expect: CG104
        at = found[0].item()  # expect: CG101
        return x * times[at]  # expect: CG202 optional, CG205 optional

    return step, lambda i: (_x(i), torch.linspace(1.0, 0.0, 8)[i % 8].to("cuda"))


def factory_ok_finds_its_step_by_argmax():
    times = torch.linspace(1.0, 0.0, 8).to("cuda")
    return (
        lambda x, t: x * times.index_select(0, (times == t).int().argmax(0, keepdim=True)),
        lambda i: (_x(i), torch.linspace(1.0, 0.0, 8)[i % 8].to("cuda")),
    )


def factory_bad_last_step_is_another():  # hazard: 9
    sigmas = torch.linspace(1.0, 0.1, 6).to("cuda")

    def step(x, t):
        at = (sigmas - t).abs().argmin()
        if at + 1 >= len(sigmas):  # expect: CG108
            return x * 0
        return x * (sigmas[at + 1] - sigmas[at])  # expect: CG101, CG202 optional

    return step, lambda i: (_x(i), torch.tensor(0.9 - 0.1 * i).to("cuda"))


# vllm-omni#2520, huggingface: a look at a mask before it is used


def factory_bad_looks_whether_any():  # hazard: 9
    def step(x):
        mask = x[:, 0] > 1
        if mask.any():  # expect: CG108
            x = x.masked_fill(mask[:, None], 0.0)  # expect: CG201 optional
        return x.softmax(-1)

    return step, _one


def factory_ok_masks_always():
    return (lambda x: x.masked_fill(x[:, :1] > 1, 0.0).softmax(-1)), _one


def factory_bad_looks_where_a_mask_is_given():  # hazard: 9
    def step(x, mask=None):
        needed = mask is not None and (mask == 0).any()
        if needed:  # expect: CG108
            x = x + (1 - mask)[:, None] * -1e4  # expect: CG201 optional
        return x

    return step, lambda i: (_x(i), torch.tensor([1.0, 1, 1, 1, float(i % 2), 1]).to("cuda"))


# sglang#4680: the longest of the batch


def _batch(i):
    return torch.tensor([2, 5, 1 + i]).to("cuda"), torch.tensor([2, 0, 1]).to("cuda")


def factory_bad_longest_of_the_batch():  # hazard: 1
    pages = torch.arange(48.0).view(3, 16).to("cuda")

    def step(lengths, pool):
        longest = lengths.max().item()  # expect: CG101
        table = pages[pool, :longest]  # expect: CG202 optional, CG208 optional
        return table.sum(-1)

    return step, _batch


def factory_ok_longest_that_may_be():
    pages = torch.arange(48.0).view(3, 16).to("cuda")

    def step(lengths, pool):
        inside = torch.arange(16, device=lengths.device) < lengths[:, None]
        return (pages[pool, :] * inside).sum(-1)

    return step, _batch


# pytorch#78549: counts of the ranks that have any


def factory_bad_means_of_ranks_with_rows():  # hazard: 5
    def step(means, counts):
        some = counts >= 1
        means, counts = means[some], counts[some]  # expect: CG104, CG208 optional
        return (means * counts[:, None]).sum(0) / counts.sum()

    return step, lambda i: (_x(i), torch.tensor([3.0, 0, 2, float(i % 2), 1, 4]).to("cuda"))


def factory_ok_means_of_all_ranks_weighted():
    def step(means, counts):
        return (means * counts[:, None]).sum(0) / counts.sum()

    return step, lambda i: (_x(i), torch.tensor([3.0, 0, 2, float(i % 2), 1, 4]).to("cuda"))


# pytorch#96632, fvdb-core#487: solvers that look at their error code


def _square(i):
    return (_x(i, 4) + 4 * torch.eye(4, device="cuda"),)


def factory_bad_inverse():  # hazard: 6
    return (lambda a: torch.inverse(a)), _square  # expect: CG105


def factory_ok_inverse_unchecked():
    return (lambda a: torch.linalg.inv_ex(a).inverse), _square


# dion#104, pytorch#106802: the learning rate of the day


def _trained(lr, **options):
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, 1).to("cuda")
    return model, torch.optim.Adam(model.parameters(), lr=lr, **options)


def factory_bad_scheduler_in_the_step():  # hazard: 11
    model, optimizer = _trained(0.1, capturable=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()  # expect: CG202
        schedule.step()  # expect: CG210 optional
        return loss.detach(), model.weight.detach().clone()

    return step, _one


def factory_ok_learning_rate_in_a_tensor():
    rate = torch.tensor(0.1).to("cuda")
    model, optimizer = _trained(rate, capturable=True)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        rate.mul_(0.9)
        return loss.detach(), model.weight.detach().clone()

    return step, _one


def factory_bad_steps_every_other_time():  # hazard: 10
    model, optimizer = _trained(0.1, capturable=True)
    state = {"n": 0}

    def step(x):
        model(x).square().mean().backward()
        state["n"] += 1  # expect: CG210 optional
        if state["n"] % 2 == 0:  # expect: CG201
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return model.weight.detach().clone()  # expect: CG201 optional, CG205 optional

    return step, _one


def factory_bad_scaler_looks_for_infinities():  # hazard: 1
    model, optimizer = _trained(0.1, capturable=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)

    def step(x):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)  # expect: CG101|CG108
        scaler.update()  # expect: CG101 optional
        return model.weight.detach().clone()

    return step, _one


def factory_ok_clips_the_gradient():
    model, optimizer = _trained(0.1, capturable=True)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return norm.clone(), model.weight.detach().clone()

    return step, _one


def factory_bad_clips_and_raises():  # hazard: 9
    model, optimizer = _trained(0.1, capturable=True)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)  # expect: CG101|CG108
        optimizer.step()
        return model.weight.detach().clone()

    return step, _one


def factory_bad_average_warms_up():  # hazard: 11
    shadow = torch.zeros(WIDTH, device="cuda")
    updates = {"n": 0}

    def step(x):
        updates["n"] += 1  # expect: CG210
        decay = min(0.99, (1 + updates["n"]) / (10 + updates["n"]))
        shadow.mul_(decay).add_(x.mean(0), alpha=1 - decay)  # expect: CG202
        return shadow.clone()

    return step, _one


def factory_ok_average_warms_up_on_device():
    shadow, n = torch.zeros(WIDTH, device="cuda"), torch.zeros((), device="cuda")

    def step(x):
        n.add_(1)
        decay = ((1 + n) / (10 + n)).clamp(max=0.99)
        shadow.copy_(shadow * decay + x.mean(0) * (1 - decay))
        return shadow.clone()

    return step, _one


def factory_ok_recomputes_a_block():
    model, optimizer = _trained(0.1, capturable=True)

    def step(x):
        optimizer.zero_grad()
        y = checkpoint(lambda t: model(t).tanh(), x, use_reentrant=False, preserve_rng_state=False)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), model.weight.detach().clone()

    return step, _one


# onnxruntime#32121: a staging buffer in pinned memory


def factory_bad_staging_written_in_the_step():  # hazard: 13
    staging, lengths = torch.zeros(6).pin_memory(), torch.zeros(6, device="cuda")

    def step(x, longest):
        staging.fill_(longest)
        lengths.copy_(staging, non_blocking=True)  # expect: CG204
        return x * lengths[:, None]

    return step, lambda i: (_x(i), float(i))


def factory_ok_staging_written_by_the_caller():
    lengths = torch.zeros(6, device="cuda")

    def step(x, staging):
        lengths.copy_(staging, non_blocking=True)
        return x * lengths[:, None]

    return step, lambda i: (_x(i), torch.full((6,), float(i)).pin_memory())


def factory_ok_weights_streamed_from_pinned():
    pinned = _x(70, WIDTH).cpu().pin_memory()

    def step(x):
        return x @ pinned.to("cuda", non_blocking=True)

    return step, _one


def factory_bad_layer_comes_and_goes():  # hazard: 3
    layer = nn.Linear(WIDTH, WIDTH)

    @torch.no_grad()
    def step(x):
        layer.to("cuda")  # expect: CG102
        y = layer(x)
        layer.to("cpu")  # expect: CG101
        return y

    return step, _one


# rtp-llm#1259, vLLM-2080Ti-Definitive#183, TensorRT-LLM#19306: metadata made anew for each batch


class Metadata:
    def __init__(self):
        self.ends = torch.zeros(6, device="cuda")


def factory_bad_metadata_made_anew_outside():  # hazard: 14
    meta = Metadata()

    def inputs(i):
        meta.ends = torch.arange(6.0).add(i).to("cuda")
        return _one(i)

    return (lambda x: x * meta.ends[:, None]), inputs  # expect: CG205|CG206


def factory_ok_metadata_written_in_place_outside():
    meta = Metadata()

    def inputs(i):
        meta.ends.copy_(torch.arange(6.0).add(i))
        return _one(i)

    return (lambda x: x * meta.ends[:, None]), inputs


def factory_ok_metadata_made_anew_inside():
    meta = Metadata()

    def step(x, lengths):
        meta.ends = torch.empty(6, device=x.device)
        meta.ends.copy_(lengths.cumsum(0))
        return x * meta.ends[:, None]

    return step, lambda i: (_x(i), torch.arange(6.0).add(i).to("cuda"))


def factory_ok_weight_unpacked_for_the_step():
    codes = torch.arange(WIDTH * WIDTH, dtype=torch.int8).view(WIDTH, WIDTH).to("cuda")
    layer = nn.Linear(WIDTH, WIDTH, bias=False).to("cuda")
    empty = torch.empty(0, device="cuda")

    @torch.no_grad()
    def step(x):
        layer.weight.data = codes.float() * 0.1
        y = layer(x)
        layer.weight.data = empty
        return y

    return step, _one


# sglang#38439, sglang#2460: hooks and logs


def factory_quiet_hook_collects_norms():  # hazard: 32
    layer, seen = nn.Linear(WIDTH, WIDTH).to("cuda"), []
    layer.register_forward_hook(lambda module, args, out: seen.append(out.norm()))  # expect: CG210 optional
    return torch.no_grad()(lambda x: layer(x)), _one


def factory_bad_log_is_formatted():  # hazard: 2
    log = logging.getLogger("onegraph.heldout")

    def step(x):
        log.debug(f"hidden {x.mean()}")  # expect: CG101
        return x + 1

    return step, _one


def factory_ok_log_is_off():
    log = logging.getLogger("onegraph.heldout")

    def step(x):
        log.debug("hidden %s", x)
        return x + 1

    return step, _one


def factory_quiet_reads_the_loss_now_and_then():  # hazard: 32
    state = {"n": 0, "loss": 0.0}

    def step(x):
        loss = x.square().mean()
        if state["n"] % 4 == 0:
            state["loss"] = loss.item()  # expect: CG210 optional
        state["n"] += 1  # expect: CG210 optional
        return loss

    return step, _one


def factory_quiet_counts_its_time():  # hazard: 32
    spent = {"seconds": 0.0, "calls": 0}

    def step(x):
        begin = time.perf_counter()
        y = x.softmax(-1)
        spent["seconds"] += time.perf_counter() - begin  # expect: CG210 optional
        spent["calls"] += 1  # expect: CG210 optional
        return y

    return step, _one


def factory_ok_ranges_for_the_profiler():
    def step(x):
        torch.cuda.nvtx.range_push("softmax")
        with torch.profiler.record_function("softmax"):
            y = x.softmax(-1)
        torch.cuda.nvtx.range_pop()
        return y

    return step, _one


# vLLM#45819: sequences by their offsets


def factory_bad_slices_by_offsets():  # hazard: 1
    def step(x, offsets):
        out = torch.zeros(3, WIDTH, device=x.device)
        for k in range(3):
            out[k] = x[offsets[k] : offsets[k + 1]].mean(0)  # expect: CG101, CG202 optional, CG208 optional
        return out

    return step, lambda i: (_x(i), torch.tensor([0, 1 + i % 3, 4, 6]).to("cuda"))


def factory_bad_cache_row_by_position():  # hazard: 1
    cache = torch.zeros(8, WIDTH, device="cuda")

    def step(x, position):
        cache[position] = x[0]  # expect: CG101, CG202 optional, CG205 optional
        return cache.sum(0)

    return step, lambda i: (_x(i), torch.tensor(i % 8).to("cuda"))


def factory_ok_cache_rows_by_positions():
    cache = torch.zeros(8, WIDTH, device="cuda")

    def step(x, position):
        cache[position] = x[:1]
        return cache.sum(0)

    return step, lambda i: (_x(i), torch.tensor([i % 8]).to("cuda"))


def factory_bad_full_of_the_largest():  # hazard: 1
    return (lambda x: torch.full((6,), x.max(), device=x.device)), _one  # expect: CG101, CG202 optional


def factory_bad_line_to_the_largest():  # hazard: 1
    return (lambda x: torch.linspace(0, x.max(), 5, device=x.device)), _one  # expect: CG101, CG202 optional


def factory_bad_checks_the_vocabulary():  # hazard: 9
    table = _x(80, 100)

    def step(ids):
        assert (ids < len(table)).all(), "a token outside of the vocabulary"  # expect: CG108
        return table[ids]

    return step, lambda i: _ids(i, 5)


def factory_ok_checks_on_the_device():
    table = _x(80, 100)

    def step(ids):
        assert ids.shape == (5,), "not the batch of this bucket"
        torch._assert_async((ids < len(table)).all())
        return table[ids]

    return step, lambda i: _ids(i, 5)


# reinforcement learning: IsaacLab#6607 and the like


def factory_bad_resets_done_environments():  # hazard: 5
    state, start = torch.zeros(6, WIDTH, device="cuda"), torch.ones(6, WIDTH, device="cuda")

    def step(x):
        state.add_(x)
        done = (state.norm(dim=-1) > 2).nonzero(as_tuple=False).squeeze(-1)  # expect: CG104
        if len(done) > 0:  # expect: CG201 optional
            state[done] = start[done]  # expect: CG201 optional, CG208 optional
        return state.clone()

    return step, _one


def factory_ok_resets_done_environments_by_where():
    state, start = torch.zeros(6, WIDTH, device="cuda"), torch.ones(6, WIDTH, device="cuda")

    def step(x):
        state.add_(x)
        state.copy_(torch.where(state.norm(dim=-1, keepdim=True) > 2, start, state))
        return state.clone()

    return step, _one


def factory_bad_acts_by_a_checked_distribution():  # hazard: 9
    def step(x):
        policy = Categorical(logits=x, validate_args=True)  # expect: CG101|CG108
        return policy.log_prob(x.argmax(-1)), policy.entropy()  # expect: CG101 optional, CG108 optional

    return step, _one


def factory_ok_acts_by_an_unchecked_distribution():
    def step(x):
        policy = Normal(x, x.exp(), validate_args=False)
        action = policy.rsample()
        return action, policy.log_prob(action)

    return step, _one


def factory_bad_explores_by_python():  # hazard: 10
    dice = random.Random(3)

    def step(x):
        if dice.random() < 0.5:  # expect: CG201
            return x.argmin(-1)  # expect: CG201 optional
        return x.argmax(-1)  # expect: CG201 optional

    return step, _one


def factory_ok_explores_by_a_given_coin():
    def step(x, coin):
        return torch.where(coin < 0.5, x.argmin(-1), x.argmax(-1))

    return step, lambda i: (_x(i), _x(i + 90, 6, 1)[:, 0])


def factory_ok_rows_by_vmap():
    return torch.func.vmap(lambda row: row.sort().values.cumsum(0) / row.norm()), _one


def factory_ok_jacobian_of_the_dynamics():
    weight = _x(85, WIDTH)

    def step(x):
        return torch.func.vmap(torch.func.jacrev(lambda row: (row @ weight).tanh()))(x)

    return step, _one


def factory_bad_all_pairs():  # hazard: 5
    def step(x):
        pairs = torch.combinations(torch.arange(6, device=x.device))  # expect: CG104|CG105
        return (x[pairs[:, 0]] - x[pairs[:, 1]]).norm(dim=-1)

    return step, _one


def factory_ok_all_pairs_by_triangle():
    def step(x):
        row, column = torch.triu_indices(6, 6, 1, device=x.device)
        return (x[row] - x[column]).norm(dim=-1)

    return step, _one


# layers that look where one does not expect it


def factory_ok_embedding_renormalizes():  # hazard: 6
    table = nn.Embedding(100, WIDTH, max_norm=0.5).to("cuda")
    return torch.no_grad()(lambda ids: table(ids)), lambda i: _ids(i, 12)


def factory_ok_bag_of_embeddings():
    table, offsets = nn.EmbeddingBag(100, WIDTH).to("cuda"), torch.tensor([0, 3, 7]).to("cuda")
    return torch.no_grad()(lambda ids: table(ids, offsets)), lambda i: _ids(i, 12)


def _padded(i):
    ends = torch.tensor([[5], [3 + i % 3]])
    return _x(i, 10).view(2, 5, WIDTH), (torch.arange(5) >= ends).to("cuda")


def _encoder(**options):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 1, **options).to("cuda").eval()


def factory_bad_encoder_nests_its_rows():  # hazard: 6
    encoder = _encoder()

    @torch.no_grad()
    def step(x, padding):
        return encoder(x, src_key_padding_mask=padding)  # expect: CG101|CG104|CG105|CG108

    return step, _padded


def factory_ok_encoder_pads_its_rows():
    encoder = _encoder(enable_nested_tensor=False)

    @torch.no_grad()
    def step(x, padding):
        return encoder(x, src_key_padding_mask=padding)

    return step, _padded


# made once, at the first call


def factory_ok_workspace_of_the_first_call():
    state = {"buffer": None}

    def step(x):
        if state["buffer"] is None:
            state["buffer"] = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")
        return x * state["buffer"]

    return step, _one


def factory_ok_copies_where_it_is_unaligned():
    def step(x):
        if x.data_ptr() % 16:
            x = x.clone()
        return F.gelu(x)

    return step, _one


def factory_ok_casts_by_autocast():
    layer = nn.Linear(WIDTH, WIDTH).to("cuda")

    @torch.no_grad()
    def step(x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return layer(x).float()

    return step, _one
