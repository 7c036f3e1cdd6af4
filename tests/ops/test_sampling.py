"""Sampling: the law against softmax, the support against a plain rewrite of top-k and top-p, independence of rows."""

import math

import pytest
import torch

from h200 import H200
from onegraph.ops.cuda import sampling as kernel
from onegraph.ops.cuda import sampling_portable
from onegraph.ops.registry import reference_ops
from onegraph.ops.sampling import greedy, sample, uniform

DRAWS, SOME = 20_000, 20


def draw(logits, *, temperature=1.0, top_k=0, top_p=1.0, seed=0, position=0):
    """One token of each row; each argument is a number for all rows or a list."""
    batch = logits.shape[0]

    def row(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(batch).contiguous()

    return sample(
        logits,
        row(temperature, torch.float32),
        row(top_k, torch.int32),
        row(top_p, torch.float32),
        row(seed, torch.int64),
        row(position, torch.int32),
    )


def many(logits, *, by="position", **params):
    """DRAWS tokens from one row of logits [V], over consecutive positions or seeds: the reference's, which draws all at
    once. A CPU draws row by row: every SOME-th of its tokens must be the same."""
    rows, numbers = logits.expand(DRAWS, -1).contiguous(), torch.arange(DRAWS)
    with reference_ops():
        tokens = draw(rows, **params, **{by: numbers})
    assert torch.equal(draw(rows[::SOME], **params, **{by: numbers[::SOME]}), tokens[::SOME])
    return tokens


def chi_square(tokens, probabilities):
    """Pearson's statistic and its degrees of freedom over the tokens expected at least five times."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    seen = expected >= 5
    return ((counts - expected)[seen] ** 2 / expected[seen]).sum().item(), int(seen.sum()) - 1


def filtered(logits, temperature, top_k, top_p):
    """The law that sampling should follow, written token by token in float64."""
    p = (logits.double() / temperature).softmax(0)
    order = sorted(range(len(p)), key=lambda i: (-p[i].item(), i))
    order = order[:top_k] if top_k else order
    total, mass, kept = sum(p[i].item() for i in order), 0.0, []
    for i in order:
        if kept and mass >= top_p * total:
            break
        kept.append(i)
        mass += p[i].item()
    law = torch.zeros(len(p), dtype=torch.float64)
    law[kept] = p[kept]
    return law / law.sum()


@pytest.mark.parametrize("by", ["position", "seed"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.6, 5, 1.0), (1.0, 0, 0.8), (0.9, 12, 0.6), (2.0, 1, 1.0), (1.0, 0, 0.0)],
)
def test_draws_follow_the_filtered_softmax(by, temperature, top_k, top_p):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    law = filtered(logits, temperature, top_k, top_p)
    other = {"position": "seed", "seed": "position"}[by]
    tokens = many(logits, by=by, temperature=temperature, top_k=top_k, top_p=top_p, **{other: 11})
    assert law[tokens].min() > 0, "a token outside the support was drawn"
    statistic, freedom = chi_square(tokens, law)
    # mean f, variance 2f: five standard deviations, and the draws are fixed by the seed, so this cannot flicker
    assert statistic <= freedom + 5 * math.sqrt(2 * freedom)


def test_uniform_numbers_are_uniform_and_uncorrelated():
    n = 1 << 18
    seed, position = torch.arange(8), torch.arange(8).int()
    u = uniform(seed, position, torch.arange(n // 8).expand(8, -1))
    assert u.min() > 0
    assert u.max() < 1
    counts = torch.histc(u.flatten().float(), bins=256, min=0, max=1).double()
    assert ((counts - n / 256) ** 2 / (n / 256)).sum() < 255 + 5 * math.sqrt(2 * 255)
    centred = u - 0.5
    for rows, columns in ((1, 0), (0, 1), (1, 1), (1, -1)):
        shifted = centred.roll((rows, columns), (0, 1))
        assert abs((centred * shifted).mean().item()) * 12 * math.sqrt(n) < 5


def test_the_integers_are_those_of_the_paper():
    """The published SplitMix64 stream of seed 1234567, so that a kernel has something to hold itself to."""
    import onegraph.ops.sampling as module

    state = torch.tensor([1234567])
    stream = module._mix(state[:, None] + torch.arange(1, 6) * module._GOLDEN)
    assert [x % 2**64 for x in stream[0].tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_draws_the_same_token_in_any_batch(dtype):
    g = torch.Generator().manual_seed(0)
    n, vocabulary = 24, 777
    logits = (torch.randn(n, vocabulary, generator=g) * 3).to(dtype)
    params = {
        "temperature": torch.rand(n, generator=g) * 2,
        "top_k": torch.randint(0, 50, (n,), generator=g),
        "top_p": torch.rand(n, generator=g),
        "seed": torch.randint(-(2**62), 2**62, (n,), generator=g),
        "position": torch.randint(0, 4096, (n,), generator=g),
    }
    together = draw(logits, **params)
    alone = torch.cat([draw(logits[i : i + 1], **{k: v[i : i + 1] for k, v in params.items()}) for i in range(n)])
    order = torch.randperm(n, generator=g)
    shuffled = draw(logits[order], **{k: v[order] for k, v in params.items()})
    assert together.tolist() == alone.tolist()
    assert shuffled.tolist() == together[order].tolist()
    assert together.tolist() == draw(logits, **params).tolist()


def test_seed_and_position_both_matter():
    logits = torch.zeros(1, 1000)
    assert len({draw(logits, seed=s).item() for s in range(50)}) > 40
    assert len({draw(logits, position=p).item() for p in range(50)}) > 40
    # seed s at position p + 1 must not repeat seed s + 1 at position p
    assert [draw(logits, seed=s, position=1).item() for s in range(20)] != [
        draw(logits, seed=s + 1, position=0).item() for s in range(20)
    ]


def test_temperature_zero_is_greedy_with_ties_to_the_lowest_index():
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(1)).mul(2).round()
    assert (logits == logits.amax(1, keepdim=True)).sum() > 64, "the case needs ties"
    first = [row.index(max(row)) for row in logits.tolist()]
    assert greedy(logits).tolist() == first
    assert draw(logits, temperature=0.0, seed=5).tolist() == first
    assert draw(logits, temperature=1.0, top_k=1, seed=5).tolist() == first


def test_top_k_keeps_exactly_k_where_values_tie():
    assert set(many(torch.zeros(10), top_k=3).tolist()) == {0, 1, 2}


def test_masked_tokens_are_never_drawn():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(2))
    logits[::2] = -math.inf
    assert (many(logits, temperature=5.0) % 2 == 1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(4)}, r"allowed is a floating point \[batch, vocabulary\]"),
        ({"logits": torch.zeros(2, 4, dtype=torch.int64)}, "allowed is a floating point"),
        ({"logits": torch.zeros(2, 0)}, "allowed is a floating point"),
        ({"temperature": torch.ones(2, dtype=torch.float64)}, r"temperature is \(2,\) torch.float64"),
        ({"top_k": torch.zeros(3, dtype=torch.int32)}, r"top_k is \(3,\) torch.int32; it must be int32 \[2\]"),
        ({"seed": torch.zeros(2, dtype=torch.int32)}, r"seed is \(2,\) torch.int32"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(change, message):
    arguments = {
        "logits": torch.zeros(2, 4),
        "temperature": torch.ones(2),
        "top_k": torch.zeros(2, dtype=torch.int32),
        "top_p": torch.ones(2),
        "seed": torch.zeros(2, dtype=torch.int64),
        "position": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        sample(*{**arguments, **change}.values())


def test_fake_implementations_agree():
    g = torch.Generator().manual_seed(0)
    for op in (greedy, sample):
        for case in op.cases[1:]:
            arguments = case.make(torch.device("cpu"), torch.float32, g)
            torch.library.opcheck(op.overload, arguments)


@pytest.mark.parametrize(
    ("rows", "width", "blocks"),
    [(1, 128256, 16), (7, 49152, 16), (8, 49152, 8), (16, 128256, 4), (16, kernel.MAX_WIDTH, 16), (999, 3, 4)],
)
def test_a_row_is_shared_by_as_many_blocks_as_run_at_once_and_hold_it(rows, width, blocks):
    size, part, shared = kernel.plan(rows, width, H200)
    assert size == blocks
    assert size * part >= width
    assert shared <= H200.shared


@pytest.mark.parametrize(
    ("built", "rows", "width", "chosen"),
    [
        ("sampling portable", 7, 128256, kernel._in_clusters),
        ("sampling portable", 8, 128256, sampling_portable.sample),
        ("sampling portable", 1, kernel.MAX_WIDTH + 1, sampling_portable.sample),
        ("sampling portable", sampling_portable.MAX_ROWS + 1, 128256, kernel._in_clusters),
        ("sampling", 8, 128256, kernel._in_clusters),
        ("portable", 1, 128256, sampling_portable.sample),
        ("portable", sampling_portable.MAX_ROWS + 1, 128256, None),
        ("sampling", 1, kernel.MAX_WIDTH + 1, None),
        ("sampling portable", 0, 128256, None),
        ("", 1, 128256, None),
    ],
)
def test_what_no_kernel_draws_from_is_left_to_torch(built, rows, width, chosen, monkeypatch):
    monkeypatch.setattr(kernel.build, "device", lambda index: H200)
    monkeypatch.setattr(kernel.KERNEL, "is_built", lambda device: "sampling" in built)
    monkeypatch.setattr(sampling_portable.KERNELS, "is_built", lambda device: "portable" in built)
    assert kernel.choose(rows, width, 0) is chosen


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize(
    "params",
    [
        (0.8, 0, 0.95), (0.8, 1000, 1.0), (2.0, 1000, 0.5), (0.8, 50, 0.0), (0.8, 0, 1.0), (0.8, 0, 0.999),
        (0.8, 9000, 0.9), (1e4, 0, 0.95), (1e-30, 0, 0.95),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("kind", ["flat", "peaked", "equal", "odd", "two"])
def test_draws_of_a_gpu_are_those_of_a_cpu(params, rows, kind):
    """Also where the list of the first block has no room for what top-k and top-p keep."""
    logits = torch.randn(rows, 20000, generator=torch.Generator().manual_seed(rows))
    logits = {
        "flat": logits, "peaked": 9 * logits, "equal": torch.zeros_like(logits), "odd": logits.round(),
        "two": (logits > 2).float(),
    }[kind]  # fmt: skip
    if kind == "odd":
        logits[0, 3], logits[0, 5], logits[-1, 7:] = -0.0, float("inf"), float("-inf")
    row = [torch.full((rows,), value) for value in params]
    arguments = [logits, row[0], row[1].int(), row[2], torch.arange(rows) - 2**61, torch.arange(rows).int() + 7]
    assert sample(*(a.cuda() for a in arguments)).tolist() == sample(*arguments).tolist()


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("params", [(0.0, 0, 1.0), (0.8, 0, 0.95), (0.8, 2000, 0.9), (0.8, 0, 1.0)])
def test_a_captured_draw_of_many_positions_is_that_of_a_cpu(params):
    """Of bfloat16 logits, as models give them; seeds and positions are new in each replay."""
    rows, width, replays = 8, 128256, 6
    logits = (3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(0))).bfloat16().float()
    heat, top_k, top_p = (torch.full((rows,), value) for value in params)
    seeds, positions = torch.arange(rows) + 2**40, torch.arange(rows).int()
    arguments = [t.cuda() for t in (logits, heat, top_k.int(), top_p, seeds, positions)]
    sample(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(*arguments)
    for i in range(replays):
        arguments[5].copy_(positions + i)
        out.fill_(-1)
        graph.replay()
        expected = sample(logits, heat, top_k.int(), top_p, seeds, positions + i)
        assert out.tolist() == expected.tolist(), f"position {i}"
