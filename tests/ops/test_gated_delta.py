"""Gated DeltaNet and Kimi Delta Attention: the recurrence of transformers, and what a state promises."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from onegraph.ops.calls import MAX_TOKENS, GatedDelta
from onegraph.ops.gated_delta import gated_delta
from test_ops import error, make

DEPTH = 2 * MAX_TOKENS


class Layer:
    """A layer's weights and its state of a few slots, and the op on a batch of its sequences.

    channels: a decay for each key channel (KDA).
    """

    def __init__(
        self, heads: tuple[int, int] = (2, 4), dims: tuple[int, int] = (16, 24), width: int = 4, limit: int = 0,
        channels: bool = False, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        (k_heads, v_heads), (dk, dv) = heads, dims
        self.generator, self.heads, self.dims, self.width, self.limit = (
            torch.Generator().manual_seed(1), heads, dims, width, limit,
        )  # fmt: skip
        self.sigmoid, each = channels, dk if channels else 1
        self.columns = 2 * k_heads * dk + v_heads * dv, v_heads * dv, v_heads, v_heads * each
        self.weight = self.randn(self.columns[0], width)
        self.a_log, self.dt_bias = self.randn(v_heads) * 0.5 - 1, self.randn(v_heads * each)
        self.norm = 1 + 0.2 * self.randn(dv)
        # What a slot held before is anything: NaN is what nothing but a choice removes.
        junk = {"dtype": torch.float32, "fill_value": torch.nan}
        self.ring = torch.full((4, width - 1 + MAX_TOKENS, self.columns[0]), torch.nan)
        self.state = torch.full((4, v_heads, dv, dk), torch.nan, dtype=dtype)
        self.base = torch.full((4, v_heads), 12345, dtype=torch.int32)
        self.keys = torch.full((4, DEPTH, k_heads, dk), **junk)
        self.deltas, self.decays = (
            torch.full((4, DEPTH, v_heads, dv), **junk), torch.full((4, DEPTH, v_heads, each), **junk),
        )  # fmt: skip

    def to(self, device: str) -> "Layer":
        """Weights and state on another device; texts and results stay on the CPU."""
        self.__dict__.update({name: t.to(device) for name, t in vars(self).items() if isinstance(t, Tensor)})
        return self

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def text(self, length: int) -> tuple[Tensor, ...]:
        """qkv, z, b and a of a sequence [length, ...]."""
        return tuple(self.randn(length, columns) for columns in self.columns)

    @property
    def written(self) -> tuple[Tensor, ...]:
        return self.ring, self.state, self.base, self.keys, self.deltas, self.decays

    def call(self, rows: list[tuple[int, int, tuple[Tensor, ...]]], tokens: int = 0) -> GatedDelta:
        """rows: (slot, position, tokens' inputs); padded by NaN to `tokens` a row, or to the longest."""
        lengths = [len(inputs[0]) for _, _, inputs in rows]
        many = tokens or max(lengths)
        padded = []
        for i, columns in enumerate(self.columns):
            x = torch.full((len(rows), many, columns), torch.nan)
            for row, (_, _, inputs) in enumerate(rows):
                x[row, : lengths[row]] = inputs[i]
            padded.append(x)
        ints = (torch.tensor(v, dtype=torch.int32) for v in ([r[0] for r in rows], [r[1] for r in rows], lengths))
        moved = ([t.to(self.weight.device) for t in each] for each in (padded, ints))
        return GatedDelta(
            *next(moved), self.weight, self.a_log, self.dt_bias, self.norm, 1e-6, *self.written, *next(moved),
            self.limit, self.sigmoid,
        )  # fmt: skip

    def run(self, *rows: tuple[int, int, tuple[Tensor, ...]], tokens: int = 0) -> list[Tensor]:
        """Of each row the outputs [its tokens, ...]."""
        out = self.step(self.call(list(rows), tokens)).cpu()
        assert not out.isnan().any()
        return [out[i, : len(row[2][0])] for i, row in enumerate(rows)]

    def step(self, call: GatedDelta) -> Tensor:
        out: Tensor = gated_delta(*call)
        return out

    def read(self, text: tuple[Tensor, ...], cuts: list[int], slot: int = 1) -> Tensor:
        """A whole text in steps that end at `cuts`."""
        outs, at = [], 0
        for end in cuts:
            outs += self.run((slot, at, tuple(x[at:end] for x in text)))
            at = end
        return torch.cat(outs)

    def applied(self, slot: int, position: int) -> Tensor:
        """S of a slot at a position, its records applied, float32 [Hv, dv, dk]."""
        state = self.state[slot].float()
        for token in range(int(self.base[slot, 0]), position):
            key, delta, decay = (t[slot, token % DEPTH] for t in (self.keys, self.deltas, self.decays))
            key = key.repeat_interleave(len(delta) // len(key), 0)
            state = state * decay[:, None] + delta[:, :, None] * key[:, None]
        return state.cpu()

    def inputs(self, text: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of a whole text q, k, v, g and beta [1, T, Hv, ...], as transformers' functions take them."""
        self.to("cpu")
        qkv, _, b, a = text
        (k_heads, v_heads), (dk, dv) = self.heads, self.dims
        padded = torch.nn.functional.pad(qkv.T, (self.width - 1, 0))
        mixed = silu(conv1d(padded, self.weight.to(qkv.dtype).unsqueeze(1), groups=len(self.weight))).T
        q, k, v = mixed.split((k_heads * dk, k_heads * dk, v_heads * dv), dim=1)
        q, k = (x.unflatten(1, (k_heads, dk)).repeat_interleave(v_heads // k_heads, 1) for x in (q, k))
        g = -self.a_log.exp().unsqueeze(1) * softplus(a + self.dt_bias).unflatten(1, (v_heads, -1))
        g = g if self.sigmoid else g.squeeze(2)
        return tuple(x.unsqueeze(0) for x in (q, k, v.unflatten(1, (v_heads, dv)), g, b.sigmoid()))

    def truth(self, text: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The recurrence in float64 on the whole text: outputs [T, Hv dv] and S [Hv, dv, dk]."""
        text = tuple(x.double() for x in text)
        q, k, v, g, beta = (x[0] for x in self.inputs(text))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        state, outs = torch.zeros(*v.shape[1:], k.shape[2], dtype=torch.float64), []
        for t in range(len(v)):
            state = state * g[t].view(len(state), 1, -1).exp()
            delta = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state = state + torch.einsum("hv,hk->hvk", delta, k[t])
            outs.append(torch.einsum("hvk,hk->hv", state, q[t]) / q.shape[2] ** 0.5)
        o, z = torch.stack(outs), text[1]
        out = (o * (o.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norm).flatten(1)
        return out * (z.sigmoid() if self.sigmoid else silu(z)), state


LAYERS = {"qwen": {}, "three": {"heads": (1, 3), "width": 3}, "equal": {"heads": (2, 2)},
          "kda": {"heads": (2, 2), "channels": True}}  # fmt: skip


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_the_truth_is_transformers(options: dict[str, Any]) -> None:
    """Its recurrence, its chunked form, and its norm behind it."""
    layer = Layer(**options)
    text = layer.text(139)
    if layer.sigmoid:
        kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
        rules = kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention
        norm = kimi.KimiLinearRMSNormGated(layer.dims[1], eps=1e-6)
    else:
        qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
        rules = qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule
        norm = qwen.Qwen3_5RMSNormGated(layer.dims[1], eps=1e-6)
    norm.weight.data.copy_(layer.norm)
    want, state = layer.truth(text)
    for rule in rules:
        o, last = rule(
            *layer.inputs(text), initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True
        )  # fmt: skip
        gate = text[1].view(-1, layer.dims[1])
        assert error(norm(o[0].reshape(gate.shape), gate).detach().view(want.shape), want) < 1e-5
        assert error(last[0].transpose(1, 2), state) < 1e-5


@pytest.mark.parametrize("limit", [0, 5, DEPTH - MAX_TOKENS])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_steps_of_any_length_are_the_recurrence(options: dict[str, Any], limit: int) -> None:
    layer = Layer(limit=limit, **options)
    text = layer.text(41)
    out = layer.read(text, [1, 3, 4, 12, 13, *range(15, 41, 3), 41])
    truth, state = layer.truth(text)
    assert error(out, truth) < 1e-5
    assert error(layer.applied(1, 41), state) < 1e-5


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 63, 64, 65, 130])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_prompt_in_chunks_is_the_recurrence(options: dict[str, Any], cut: int) -> None:
    layer = Layer(limit=4, **options)
    text = layer.text(139)
    out = layer.read(text, [cut, 135, 136, 139])
    truth, state = layer.truth(text)
    assert error(out, truth) < 2e-5
    assert error(layer.applied(1, 139), state) < 2e-5


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_how_many_tokens_a_step_has_and_when_s_is_written_change_nothing(options: dict[str, Any]) -> None:
    """Up to the last bits, which torch's functions on a CPU give by where in a vector a number is."""
    plain, other = Layer(**options), Layer(limit=7, **options)
    text = plain.text(40)
    first, second = plain.read(text, list(range(1, 41))), other.read(text, [1, 5, 6, 14, 18, 20, *range(22, 41)])
    assert error(first, second) < 1e-6
    assert error(plain.applied(1, 40), other.applied(1, 40)) < 1e-6


@pytest.mark.parametrize("limit", [0, 8])
@pytest.mark.parametrize("kept", range(1, 5))
def test_drafts_that_are_taken_back_never_happened(kept: int, limit: int) -> None:
    layer, plain = Layer(limit=limit), Layer(limit=limit)
    text, wrong = layer.text(60), layer.text(60)
    layer.read(text, [20])
    plain.read(text, [20])
    at, outs = 20, []
    while at < 55:
        drafted = tuple(torch.cat((x[at : at + kept], y[at + kept : at + 4])) for x, y in zip(text, wrong, strict=True))
        outs.append(layer.run((1, at, drafted))[0][:kept])
        at += kept
    want = [plain.run((1, i, tuple(x[i : i + 1] for x in text)))[0] for i in range(20, at)]
    assert error(torch.cat(outs), torch.cat(want)) < 1e-6
    assert error(layer.applied(1, at), plain.applied(1, at)) < 1e-6


def test_a_step_run_again_gives_the_same() -> None:
    layer = Layer(limit=3)
    text = layer.text(30)
    layer.read(text, [12, 15, 17])
    step = (1, 17, tuple(x[17:20] for x in text))
    first, after = layer.run(step), [t.clone() for t in layer.written]
    second = layer.run(step)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, layer.written, strict=True))


@pytest.mark.parametrize("tokens", [3, MAX_TOKENS + 1])
def test_padding_and_rows_without_tokens_touch_no_state(tokens: int) -> None:
    layer = Layer()
    text = layer.text(20)
    layer.read(text, [9, 12])
    before = [t.clone() for t in layer.written]
    none = tuple(x[:0] for x in text)
    layer.run((0, 0, tuple(x[:2] for x in text)), (1, 12, none), (0, 7, none), tokens=tokens)
    for a, b in zip(before, layer.written, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("first", [1, 3, MAX_TOKENS, MAX_TOKENS + 3])
def test_a_recycled_slot_begins_anew(first: int) -> None:
    """A text of any first length, also one that a decode step brings: what the slot held is never seen."""
    used, fresh = Layer(), Layer()
    old, text = used.text(40), used.text(20)
    used.read(old, [30, 33])
    ends = [first, *range(first + 1, 21)]
    assert torch.equal(used.read(text, ends), fresh.read(text, ends))


def test_rows_are_alone() -> None:
    layer, other = Layer(limit=4), Layer(limit=4)
    texts = [layer.text(20) for _ in range(3)]
    for slot, text in enumerate(texts, 1):
        layer.read(text, [4 + slot], slot)
        other.read(text, [4 + slot], slot)
    rows = [(s, 4 + s, tuple(x[4 + s : 4 + s + n] for x in texts[s - 1])) for s, n in ((3, 2), (1, 4), (2, 1))]
    together = layer.run(*rows)
    for row, got in zip(rows, together, strict=True):
        assert error(got, other.run(row)[0]) < 1e-6


def test_bfloat16_state_is_near() -> None:
    layer = Layer(limit=6, dtype=torch.bfloat16)
    text = layer.text(60)
    out = layer.read(text, [30, *range(31, 61)])
    assert 1e-6 < error(out, layer.truth(text)[0]) < 1e-2


RATES = {"b": None, "a": None, "x": torch.zeros(1, 1, 40), "rates": torch.zeros(8, 40)}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"limit": DEPTH}, r"limit is 16; of 16 records, 1 of which a step may write, from 0 to 15 may wait"),
        ({"z": torch.zeros(1, 1, 9)}, r"z is torch.float32 \(1, 1, 9\) on cpu; it must be torch.float32 \(1, 1, 96\)"),
        ({"qkv": torch.zeros(1, 1, 9)}, r"qkv has 9 columns and weight 160 rows; 2 key heads of 16 and 4 value heads"),
        ({"state": torch.zeros(4, 4, 24, 16, dtype=torch.float16)}, "it must be float32 or bfloat16"),
        ({"state": torch.zeros(4, 3, 24, 16)}, "3 heads and 2 kv heads"),
        ({"base": torch.zeros(4, 4)}, r"base is \(4, 4\) torch.float32; it must be int32 \[4, 4\]"),
        ({"decays": torch.zeros(4, 16, 4, 3)}, "decays has 3 numbers a head; it must have 1, or 16"),
        ({"ring": torch.zeros(4, 3, 160)}, "ring has 3 places; a convolution of width 4 over 1 tokens needs 4"),
        ({"weight": torch.zeros(160, 1)}, "of width 2 or more"),
        ({"b": torch.zeros(1, 1, 8)[..., ::2]}, "b has strides"),
        ({"keys": torch.zeros(4, 16, 2)}, r"keys is torch.float32 \(4, 16, 2\); it must be \[slots, D, Hk, dk\]"),
        ({"counts": torch.zeros(2, dtype=torch.int32)}, r"counts is \(2,\)"),
        ({"b": None}, "got a; give b and a, or x and rates, and x_norm with x only"),
        ({"b": None, "a": None}, "got no rates; give b and a, or x and rates"),
        ({"rates": torch.zeros(8, 40)}, "got b, a, rates; give b and a, or x and rates"),
        ({"x_norm": torch.ones(40)}, "got b, a, x_norm; give"),
        (RATES | {"x": torch.zeros(1, 2, 40)}, r"x is torch.float32 \(1, 2, 40\) on cpu; it must be .* \(1, 1, 40\)"),
        (RATES | {"rates": torch.zeros(8, 41)}, r"rates is \(8, 41\) torch.float32; it must be float32 \[8, 40\]"),
        (RATES | {"x_norm": torch.ones(41)}, r"x_norm is \(41,\) torch.float32; it must be float32 \[40\]"),
        (RATES | {"decays": torch.zeros(4, 16, 4, 16), "dt_bias": torch.zeros(64)}, "16 decays a head; allowed is 1"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], why: str) -> None:
    layer = Layer()
    call = replace(layer.call([(1, 0, layer.text(1))]), **change)
    with pytest.raises(ValueError, match=why):
        gated_delta(*call)


@pytest.mark.parametrize("case", gated_delta.cases, ids=lambda case: case.name)
def test_cases_keep_within_the_contract(case: Any) -> None:
    """No case's step may write a record over one that waits."""
    call = GatedDelta(*make(case, torch.float32))
    waiting = torch.where(call.positions == 0, 0, call.positions - call.base[call.slots.long(), 0])
    assert (waiting >= 0).all()
    if call.qkv.shape[1] <= MAX_TOKENS:
        assert (waiting + call.counts <= call.keys.shape[1]).all()
