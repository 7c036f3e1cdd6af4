"""Held out: written after the simulation, which was not changed for it. Pieces of serving engines."""

import torch
from torch import nn


class Scheduler:
    """Host bookkeeping beside a device block table."""

    def __init__(self, rows):
        self.rows = rows
        self.lengths = [1] * rows
        self.table = torch.zeros(rows, 4, dtype=torch.int64, device="cuda")

    def advance(self):
        self.lengths = [n + 1 for n in self.lengths]


def factory_bad_max_length_from_device():
    cache = torch.arange(128.0, device="cuda").view(4, 32)

    def attend(q, lengths):
        longest = lengths.max().item()  # expect: CG101
        scores = q * cache[:, :longest]  # expect: CG202 optional, CG208 optional
        return scores.sum(-1)

    def step(q, lengths):
        return attend(q.unsqueeze(-1), lengths)

    return step, lambda i: (torch.ones(4, device="cuda"), torch.tensor([1, 2, 3, 4 + i], device="cuda"))


def factory_bad_scheduler_lengths():
    scheduler = Scheduler(2)
    lengths = torch.zeros(2, device="cuda")

    def step(x):
        lengths.fill_(scheduler.lengths[0])  # expect: CG202
        scheduler.advance()
        return x / lengths

    return step, lambda i: (torch.ones(2, device="cuda") * (i + 1),)


def factory_bad_stop_check():
    def step(logits):
        token = logits.argmax(-1)
        finished = (token == 2).any()
        if finished:  # expect: CG108
            token = torch.zeros_like(token)
        return token

    return step, lambda i: (torch.eye(8, device="cuda")[[i % 8, 2]],)


def factory_bad_sequence_padding():
    def pad(rows):
        width = max(len(r) for r in rows)
        return [r + [0] * (width - len(r)) for r in rows]

    def step(x, rows):
        ids = torch.tensor(pad(rows), device=x.device)  # expect: CG102
        return x[ids].sum(-1)

    return step, lambda i: (torch.arange(16.0, device="cuda"), [[1, 2, 3], [4 + i]])


def factory_bad_slot_mapping():
    cache = torch.zeros(16, 4, device="cuda")

    class Writer:
        next_slot = 0

        def write(self, row):
            cache[self.next_slot : self.next_slot + 1] = row  # expect: CG202
            self.next_slot += 1  # expect: CG210

    writer = Writer()

    def step(x):
        writer.write(x)
        return cache.sum(0)

    return step, lambda i: (torch.full((1, 4), 1.0 + i, device="cuda"),)


def factory_bad_logprobs_to_host():
    def step(logits):
        logprobs = torch.log_softmax(logits, -1)
        top = logprobs.max(-1)
        best = top.values.to("cpu")  # expect: CG101
        return top.indices, logprobs * len(best)

    return step, lambda i: (torch.arange(8.0, device="cuda").view(2, 4) * (i + 1),)


def factory_bad_token_filter():
    def step(tokens, scores):
        keep = tokens != 0
        return scores[keep].mean()  # expect: CG104

    return step, lambda i: (torch.tensor([0, 1, 2, i], device="cuda"), torch.arange(4.0, device="cuda"))


def factory_bad_positions_from_mask():
    def step(mask):
        positions = [int(row.sum()) for row in mask]  # expect: CG101
        return mask.float() * positions[0]  # expect: CG202 optional

    return step, lambda i: ((torch.arange(6, device="cuda") <= i).view(2, 3),)


def factory_ok_slot_mapping_on_device():
    cache = torch.zeros(16, 4, device="cuda")

    def step(x, slots):
        cache[slots] = x
        return cache.sum(0)

    return step, lambda i: (torch.full((1, 4), 1.0 + i, device="cuda"), torch.tensor([i], device="cuda"))


def factory_ok_stop_mask():
    finished = torch.zeros(2, dtype=torch.bool, device="cuda")

    def step(logits):
        token = logits.argmax(-1)
        finished.logical_or_(token == 2)
        return torch.where(finished, 0, token)

    return step, lambda i: (torch.eye(8, device="cuda")[torch.tensor([i % 8, 2], device="cuda")],)


def factory_ok_masked_mean():
    def step(tokens, scores):
        keep = (tokens != 0).float()
        return (scores * keep).sum() / keep.sum().clamp_min(1)

    return step, lambda i: (torch.tensor([0, 1, 2, i], device="cuda"), torch.arange(4.0, device="cuda"))


def factory_ok_paged_gather():
    pages = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0)).to("cuda")

    def step(table, length):
        rows = pages[table].reshape(-1, 4)
        valid = torch.arange(rows.shape[0], device="cuda") < length
        return (rows * valid.unsqueeze(-1)).sum(0)

    return step, lambda i: (torch.tensor([3, 1, i % 8], device="cuda"), torch.tensor([2 + i], device="cuda"))


def factory_ok_top_p():
    def step(logits):
        ordered, index = torch.softmax(logits, -1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered > 0.9
        return torch.zeros_like(logits).scatter(-1, index, ordered.masked_fill(beyond, 0.0))

    return step, lambda i: (torch.arange(8.0, device="cuda").view(2, 4) * (i + 1),)


def factory_ok_module_list_static():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to("cuda")

    @torch.no_grad()
    def step(x):
        for index, layer in enumerate(layers):
            x = layer(x) if index % 2 else torch.relu(layer(x))
        return x

    return step, lambda i: (torch.full((2, 4), 0.1 * (i + 1), device="cuda"),)
