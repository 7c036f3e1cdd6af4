"""How a checkpoint is cut for vLLM's layers: what the ranks compute adds up to the whole, or a name is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onegraph.formats.e8p import KEEP, codebook, linear_tensors
from onegraph.integrations.vllm.shards import Share, Slots
from onegraph.ops.e8p import e8p_linear


def stored(n: int, k: int, bits: int, seed: int) -> dict[str, Tensor]:
    """One linear as a checkpoint holds it, random."""
    g = torch.Generator().manual_seed(seed)
    if bits == KEEP:
        return {"weight": torch.randn(n, k, generator=g)}
    tensors = {}
    for suffix, (shape, dtype) in linear_tensors(n, k, bits).items():
        if dtype.is_floating_point:
            tensors[suffix] = (torch.randn(shape, generator=g) * 0.1 + 1).to(dtype)
        else:
            info = torch.iinfo(dtype)
            tensors[suffix] = torch.randint(info.min, info.max + 1, shape, generator=g, dtype=dtype)
    return tensors


def whole(tensors: dict[str, Tensor], bits: int, x: Tensor) -> Tensor:
    if bits == KEEP:
        return x @ tensors["weight"].T
    scales = tensors["in_scale"].float(), tensors["out_scale"].float() * tensors["scale"]
    return e8p_linear(x, tensors["codes"], tensors.get("residual"), codebook(), *scales, None, bits)


def loaded(slots: Slots, layers: list[dict[str, Tensor]], ids: list[Any]) -> nn.Module:
    module = nn.Module()
    slots.create(module, torch.float32)
    before = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    for tensors, shard in zip(layers, ids, strict=True):
        for suffix, tensor in tensors.items():
            parameter = getattr(module, suffix)
            parameter.weight_loader(parameter, tensor, *([] if shard is None else [shard]))
    slots.finish(module)
    assert before == {name: parameter.data_ptr() for name, parameter in module.named_parameters()}, "storage moved"
    return module


def outputs(slots: Slots, module: Any, x: Tensor) -> list[Tensor]:
    """What each part computes from its slots."""
    found = []
    for i, part in enumerate(slots.parts):
        views = {
            name: slots.view(name, parameter.data, i)
            for name, parameter in module.named_parameters()
            if name not in ("weight", "codes", "residual") or slots.spans[name][i][0] < slots.spans[name][i][1]
        }
        assert all(view.data_ptr() >= getattr(module, name).data_ptr() for name, view in views.items())
        found.append(whole(views, part.bits, x))
    return found


RATES = {"same": (4, 4, 4), "mixed": (2, 3, 4), "kept": (4, KEEP, 3), "three": (3, 3, 3)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rates", RATES.values(), ids=list(RATES))
def test_columns_of_a_fused_layer(rates: tuple[int, ...], ranks: int) -> None:
    """q of 512 rows, k and v of 256 with two heads: at four ranks two share each head of k and v."""
    k, sizes = 256, (512, 256, 256)
    layers = [stored(n, k, bits, seed) for seed, (n, bits) in enumerate(zip(sizes, rates, strict=True))]
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(9))
    wanted = [whole(tensors, bits, x) for tensors, bits in zip(layers, rates, strict=True)]
    local = [512 // ranks, *[256 // min(ranks, 2)] * 2]
    for rank in range(ranks):
        slots = Slots(dict(zip("abc", rates, strict=True)), local, k, Share(rank, ranks))
        got = outputs(slots, loaded(slots, layers, ["q", "k", "v"]), x)
        for want, part, replicas in zip(wanted, got, (1, *[ranks // min(ranks, 2)] * 2), strict=True):
            first = rank // replicas * part.shape[1]
            torch.testing.assert_close(part, want[:, first : first + part.shape[1]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rows_of_a_layer_add_up(bits: int) -> None:
    tensors = stored(192, 512, bits, 0)
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(2, 192)
    for rank in range(4):
        slots = Slots({"o_proj": bits}, [192], 128, Share(rank, 4))
        part = x[:, rank * 128 : rank * 128 + 128].contiguous()
        total += outputs(slots, loaded(slots, [tensors], [None]), part)[0]
    torch.testing.assert_close(total, whole(tensors, bits, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rotated", [True, False])
def test_vocabulary_is_padded_and_cut(rotated: bool) -> None:
    tensors = stored(384, 64, 4, 0)
    for rank, used in ((0, (0, 256)), (1, (256, 128))):
        slots = Slots({"lm_head": 4}, [256], 64, Share(rank, 2, vocabulary=used, rotated=rotated))
        module: Any = loaded(slots, [tensors], [None])
        first, count = used
        assert torch.equal(module.codes[:count], tensors["codes"][first : first + count])
        scale = tensors["out_scale"].float() * tensors["scale"]
        assert torch.equal(module.out_scale[:count], scale[first : first + count])
        assert not module.out_scale[count:].any()


def refusal(
    parts: dict[str, int], rows: list[int], k: int, share: Share, tensors: dict[str, Tensor], shard: Any
) -> str:
    try:
        loaded(Slots(parts, rows, k, share), [tensors], [shard])
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_what_does_not_divide_is_refused_by_name() -> None:
    linear = stored(576, 256, 4, 0)
    assert "o_proj: its number of outputs is 576, rotated in blocks of 64" in refusal(
        {"o_proj": 4}, [288], 256, Share(0, 2), linear, None
    )
    assert "d_proj: its number of inputs is 256, rotated in blocks of 128" in refusal(
        {"d_proj": 4}, [576], 64, Share(1, 4), linear, None
    )
    assert "is 576 in the checkpoint, of which 200 is no share among 3 ranks" in refusal(
        {"o_proj": 4}, [200], 256, Share(0, 3), linear, None
    )
    head = Share(0, 4, vocabulary=(0, 192))
    assert "lm_head: its number of rows is 768" in refusal({"lm_head": 4}, [192], 64, head, stored(768, 64, 4, 0), None)


def test_what_a_checkpoint_may_not_hold() -> None:
    tensors = stored(128, 64, 4, 0)
    alone = {"up": 4}, [128], 64, Share()
    assert "holds no up.residual" in refusal(*alone, {k: v for k, v in tensors.items() if k != "residual"}, None)
    assert "up.codes is torch.int32" in refusal(*alone, tensors | {"codes": tensors["codes"].int()}, None)
    assert "up.in_scale holds NaN" in refusal(*alone, tensors | {"in_scale": tensors["in_scale"] * float("nan")}, None)
    assert "comes as part None of 2 linears" in refusal({"a": 4, "b": 4}, [128, 128], 64, Share(), tensors, None)
    with pytest.raises(ValueError, match="vLLM makes 3 linears of it, the checkpoint has 1"):
        Slots({"qkv": 4}, [64, 64, 64], 64, Share())
    with pytest.raises(ValueError, match="groups of 8"):
        Slots({"odd": 4}, [64], 60, Share())


def test_loading_again_starts_from_the_file() -> None:
    """Reloaded weights (a trainer's) pass through the same loader and the same folding of scales."""
    slots = Slots({"up": 3}, [128], 64, Share())
    first, second = stored(128, 64, 3, 0), stored(128, 64, 3, 1)
    module: Any = loaded(slots, [first], [None])
    for suffix, tensor in second.items():
        parameter = getattr(module, suffix)
        parameter.weight_loader(parameter, tensor)
    slots.finish(module)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(outputs(slots, module, x)[0], whole(second, 3, x))
