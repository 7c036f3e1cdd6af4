"""How a checkpoint is cut for vLLM's layers: what the ranks compute adds up to the whole, or a name is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onegraph.formats.dense import DENSE
from onegraph.formats.e8p import E8P
from onegraph.formats.mxfp4 import MXFP4
from onegraph.formats.nvfp4 import NVFP4
from onegraph.formats.rotated import RotatedFormat
from onegraph.formats.trellis import TRELLIS
from onegraph.formats.weight import WeightFormat
from onegraph.integrations.vllm.shards import Shard, Slots
from onegraph.ops.weight import weight_ops


def stored(n: int, k: int, format: WeightFormat, seed: int) -> dict[str, Tensor]:
    """One linear as a checkpoint holds it, random, by the suffixes of its tensors' names."""
    g = torch.Generator().manual_seed(seed)
    tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in format.layout(n, k).items()}
    format.fill(tensors, k, g)
    for tensor in tensors.values():
        if tensor.dtype.is_floating_point:
            tensor.mul_(1 + 0.1 * torch.randn(tensor.shape, generator=g))
    names = format.names((), "x")
    return {names[key].removeprefix("x."): tensor for key, tensor in tensors.items()}


def whole(tensors: dict[str, Tensor], format: WeightFormat, x: Tensor) -> Tensor:
    """What the linear in the file computes: by its decoded weight."""
    names = format.names((), "x")
    found = format.fold({key: tensors[names[key].removeprefix("x.")] for key in format.stored})
    return x @ weight_ops(format).decode(format, found | format.constants(x.device)).T


def loaded(slots: Slots, layers: list[dict[str, Tensor]], ids: list[Any]) -> nn.Module:
    module = nn.Module()
    slots.create(module)
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
    spans = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in module.parameters()]
    found = []
    for i, part in enumerate(slots.parts):
        given = slots.kernel_args(module, i)
        for view in (given[key] for key in part.format.fields):
            assert any(first <= view.data_ptr() < last for first, last in spans), "a copy"
        found.append(part.ops.linear(part.format, x, given, None, None, None, False, False))
    return found


FORMATS = {
    "same": (E8P[4], E8P[4], E8P[4]),
    "mixed": (E8P[2], E8P[3], E8P[4]),
    "kept": (E8P[4], DENSE, E8P[3]),
    "three": (E8P[3], E8P[3], E8P[3]),
    "another": (MXFP4, E8P[4], DENSE),
    "floats": (MXFP4, MXFP4, MXFP4),
    "tiles": (TRELLIS[3], TRELLIS[3], TRELLIS[3]),
    "tiles of several rates": (TRELLIS[1], E8P[4], TRELLIS[8]),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("formats", FORMATS.values(), ids=list(FORMATS))
def test_columns_of_a_fused_layer(formats: tuple[WeightFormat, ...], ranks: int) -> None:
    """q of 512 rows, k and v of 256 with two heads: at four ranks two share each head of k and v."""
    k, sizes = 256, (512, 256, 256)
    layers = [stored(n, k, format, seed) for seed, (n, format) in enumerate(zip(sizes, formats, strict=True))]
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(9))
    wanted = [whole(tensors, format, x) for tensors, format in zip(layers, formats, strict=True)]
    local = [512 // ranks, *[256 // min(ranks, 2)] * 2]
    for rank in range(ranks):
        slots = Slots(dict(zip("abc", formats, strict=True)), local, k, Shard(rank, ranks), torch.float32)
        got = outputs(slots, loaded(slots, layers, ["q", "k", "v"]), x)
        for want, part, replicas in zip(wanted, got, (1, *[ranks // min(ranks, 2)] * 2), strict=True):
            first = rank // replicas * part.shape[1]
            torch.testing.assert_close(part, want[:, first : first + part.shape[1]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", [E8P[3], MXFP4, DENSE], ids=repr)
def test_one_linear_of_the_file_where_vllm_counts_three(format: WeightFormat) -> None:
    """Phi-3's qkv_proj: each rank has its rows of q, of k and of v, one behind the other."""
    sizes, k = (512, 256, 256), 256
    tensors = stored(sum(sizes), k, format, 0)
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(9))
    want = whole(tensors, format, x).split(sizes, dim=1)
    for rank in range(2):
        slots = Slots({"qkv_proj": format}, [256, 128, 128], k, Shard(rank, 2), torch.float32)
        (got,) = outputs(slots, loaded(slots, [tensors], [None]), x)
        own = [part.chunk(2, dim=1)[rank] for part in want]
        torch.testing.assert_close(got, torch.cat(own, dim=1), rtol=1e-4, atol=1e-4)
    slots = Slots({"qkv_proj": format}, [128, 128, 128], k, Shard(0, 4), torch.float32)
    with pytest.raises(ValueError, match=r"qkv_proj: its number of outputs is 1024 .* no share among 4 ranks"):
        loaded(slots, [tensors], [None])


@pytest.mark.parametrize("formats", [(E8P[3], E8P[3]), (TRELLIS[3], DENSE)], ids=str)
def test_two_linears_of_the_file_where_vllm_counts_four(formats: tuple[WeightFormat, ...]) -> None:
    """Qwen3.5's in_proj_qkvz: queries, keys and values are one linear of the checkpoint, output gates another."""
    sizes, k, names = (256, 256, 512), 256, ("b.in_proj_qkv", "b.in_proj_z")
    layers = [stored(n, k, format, i) for i, (n, format) in enumerate(zip((sum(sizes), 512), formats, strict=True))]
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(9))
    qkv, z = (whole(tensors, format, x) for tensors, format in zip(layers, formats, strict=True))
    for rank in range(2):
        parts = dict(zip(names, formats, strict=True))
        slots = Slots(parts, [128, 128, 256, 256], k, Shard(rank, 2), torch.float32)
        got = outputs(slots, loaded(slots, layers, [(0, 1, 2), 3]), x)
        own = [part.chunk(2, dim=1)[rank] for part in qkv.split(sizes, dim=1)]
        torch.testing.assert_close(got[0], torch.cat(own, dim=1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got[1], z.chunk(2, dim=1)[rank], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"b.in_proj_qkv: vLLM makes 3 linears of it, the checkpoint has 2"):
        Slots(dict(zip(names, formats, strict=True)), [128, 128, 256], k, Shard(), torch.float32)


def test_pieces_that_cut_a_rotation_block() -> None:
    tensors = stored(384, 64, E8P[4], 0)
    slots = Slots({"gate_up_proj": E8P[4]}, [64, 128], 64, Shard(0, 2), torch.float32)
    with pytest.raises(ValueError, match=r"gate_up_proj: rows 0:64 of 384 cut a rotation block"):
        loaded(slots, [tensors], [None])


@pytest.mark.parametrize("format", [*E8P.values(), MXFP4, DENSE], ids=repr)
def test_rows_of_a_layer_add_up(format: WeightFormat) -> None:
    tensors = stored(192, 512, format, 0)
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(2, 192)
    for rank in range(4):
        slots = Slots({"o_proj": format}, [192], 128, Shard(rank, 4), torch.float32)
        part = x[:, rank * 128 : rank * 128 + 128].contiguous()
        total += outputs(slots, loaded(slots, [tensors], [None]), part)[0]
    torch.testing.assert_close(total, whole(tensors, format, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("same_input", [True, False])
@pytest.mark.parametrize("formats", FORMATS.values(), ids=list(FORMATS))
def test_what_is_one_layer_is_one_launch(formats: tuple[WeightFormat, ...], same_input: bool) -> None:
    """Parts of one format whose shared tensors have the same bits; 64 rows among 128 are other rotation blocks."""
    for sizes in ((256, 128, 128), (256, 128, 64)):
        layers = [stored(n, 256, format, seed) for seed, (n, format) in enumerate(zip(sizes, formats, strict=True))]
        scales = [tensors["in_scale"] for tensors in layers if "in_scale" in tensors]
        for scale in scales[1:] if same_input else ():
            scale.copy_(scales[0])
        slots = Slots(dict(zip("abc", formats, strict=True)), sizes, 256, Shard(), torch.float32)
        module = loaded(slots, layers, ["q", "k", "v"])
        rotated = isinstance(formats[0], RotatedFormat)
        exact = len(set(formats)) == 1 and (not rotated or (same_input and sizes[-1] == 128))
        assert slots.joined(module) == exact
        if exact:
            x = torch.randn(2, 256, generator=torch.Generator().manual_seed(3))
            part = slots.parts[0]
            once = part.ops.linear(part.format, x, slots.kernel_args(module, None), None, None, None, False, False)
            assert torch.equal(once, torch.cat(outputs(slots, module, x), dim=1))


@pytest.mark.parametrize("format", [*E8P.values(), MXFP4, NVFP4, DENSE], ids=repr)
def test_made_up_weights_keep_the_size_of_what_they_read(format: WeightFormat) -> None:
    slots = Slots({"a": format, "b": format}, [256, 256], 512, Shard(), torch.float32)
    module = nn.Module()
    slots.create(module)
    slots.finish(module, made_up=True)
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(4))
    for y in outputs(slots, module, x):
        assert 0.5 < float(y.std()) < 2


@pytest.mark.parametrize("by_row", [True, False])
def test_vocabulary_is_padded_and_cut(by_row: bool) -> None:
    tensors = stored(384, 64, E8P[4], 0)
    for rank, used in ((0, (0, 256)), (1, (256, 384))):
        share = Shard(rank, 2, vocabulary=used, by_row=by_row)
        slots = Slots({"lm_head": E8P[4]}, [256], 64, share, torch.float32)
        module: Any = loaded(slots, [tensors], [None])
        first, last = used
        count = last - first
        assert torch.equal(module.codes[:count], tensors["codes"][first:last])
        scale = tensors["out_scale"].float() * tensors["scale"]
        assert torch.equal(module.out_scale[:count], scale[first:last])
        assert not module.out_scale[count:].any()
        assert len(slots.kernel_args(module, None, rows=count)["codes"]) == count


def test_tiles_of_a_vocabulary_are_padded_and_cut() -> None:
    tensors, ids = stored(144, 64, TRELLIS[5], 0), torch.arange(144)
    whole = TRELLIS[5].fold(dict(tensors))
    for used in ((0, 96), (96, 144), (144, 144)):
        slots = Slots({"embed": TRELLIS[5]}, [96], 64, Shard(1, 3, vocabulary=used, by_row=True), torch.float32)
        module: Any = loaded(slots, [tensors], [None])
        run, given = slots.parts[0].ops.embedding, slots.kernel_args(module, None)
        assert run is not None
        own = ids[slice(*used)]
        assert torch.equal(run(TRELLIS[5], own - used[0], given), run(TRELLIS[5], own, whole))
        assert not given["out_scale"][len(own) :].any()


def refusal(
    parts: dict[str, WeightFormat], rows: list[int], k: int, share: Shard, tensors: dict[str, Tensor], shard: Any
) -> str:
    try:
        loaded(Slots(parts, rows, k, share, torch.float32), [tensors], [shard])
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_what_does_not_divide_is_refused_by_name() -> None:
    e8p = E8P[4]
    linear = stored(576, 256, e8p, 0)
    told = refusal({"o_proj": e8p}, [288], 256, Shard(0, 2), linear, None)
    assert "o_proj: rows 0:288 of 576 cut a rotation block" in told
    assert told.endswith("choose a smaller tensor_parallel_size, or keep this layer unquantized")
    told = refusal({"d_proj": e8p}, [576], 64, Shard(1, 4), linear, None)
    assert "d_proj: columns 64:128 of 256 cut a rotation block" in told
    assert "its number of outputs is 576 in the checkpoint, of which 200 is no share among 3 ranks" in refusal(
        {"o_proj": e8p}, [200], 256, Shard(0, 3), linear, None
    )
    head = Shard(0, 4, vocabulary=(0, 192))
    assert "lm_head: rows 0:192 of 768 cut" in refusal({"lm_head": e8p}, [192], 64, head, stored(768, 64, e8p, 0), None)
    tiles, within = stored(144, 64, TRELLIS[3], 0), Shard(1, 8, vocabulary=(24, 48), by_row=True)
    told = refusal({"embed": TRELLIS[3]}, [24], 64, within, tiles, None)
    assert told.startswith("embed: a linear of 24 x 64 cannot be stored as trellis at 3 bits; tiles have 16 outputs")
    assert told.endswith("or keep this layer unquantized")
    assert refusal({"up": MXFP4}, [8], 32, Shard(0, 3), stored(24, 96, MXFP4, 0), None) == "nothing was refused"


def test_what_a_checkpoint_may_not_hold() -> None:
    tensors = stored(128, 64, E8P[4], 0)
    alone: tuple[Any, ...] = {"up": E8P[4]}, [128], 64, Shard()
    assert "holds no up.residual" in refusal(*alone, {k: v for k, v in tensors.items() if k != "residual"}, None)
    assert "up.codes is torch.int32 of 2 dimensions; in e8p at 4 bits it must be int16 of 2" in refusal(
        *alone, tensors | {"codes": tensors["codes"].int()}, None
    )
    assert "up.in_scale holds NaN" in refusal(*alone, tensors | {"in_scale": tensors["in_scale"] * float("nan")}, None)
    assert "comes as part None of 2 linears" in refusal(
        {"a": E8P[4], "b": E8P[4]}, [128, 128], 64, Shard(), tensors, None
    )
    mixed = {"a": E8P[2], "b": E8P[4]}
    assert "a.residual is in the checkpoint; e8p at 2 bits has no" in refusal(
        mixed, [128, 128], 64, Shard(), tensors, "q"
    )
    one, two = (stored(128, 128, TRELLIS[bits], 0) for bits in (1, 2))
    for codes, named in (
        (two["codes"], "in_scale has shape (128,)"),
        (one["codes"][:, 2:], "codes has shape (8, 126)"),
    ):
        told = refusal({"up": TRELLIS[1]}, [128], 128, Shard(0, 2), one | {"codes": codes}, None)
        assert told.startswith(f"up.{named}, which is no tensor of trellis at 1 bit with as many inputs as the others")
    with pytest.raises(ValueError, match="vLLM makes 3 linears of it, the checkpoint has 2"):
        Slots({"q": E8P[4], "kv": E8P[4]}, [64, 64, 64], 64, Shard(), torch.float32)
    with pytest.raises(ValueError, match="groups of 8"):
        Slots({"odd": E8P[4]}, [64], 60, Shard(), torch.float32)


def test_loading_again_starts_from_the_file() -> None:
    """Reloaded weights (a trainer's) pass through the same loader and the same folding of scales."""
    slots = Slots({"up": E8P[3]}, [128], 64, Shard(), torch.float32)
    first, second = stored(128, 64, E8P[3], 0), stored(128, 64, E8P[3], 1)
    module: Any = loaded(slots, [first], [None])
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(outputs(slots, module, x)[0], whole(first, E8P[3], x), rtol=1e-4, atol=1e-4)
    assert module.scale == 1
    for suffix, tensor in second.items():
        parameter = getattr(module, suffix)
        parameter.weight_loader(parameter, tensor)
    slots.finish(module)
    torch.testing.assert_close(outputs(slots, module, x)[0], whole(second, E8P[3], x), rtol=1e-4, atol=1e-4)


def test_the_norm_in_front_goes_into_buffers_that_were_there() -> None:
    slots = Slots({"a": E8P[2], "b": E8P[4]}, [128, 128], 64, Shard(), torch.float32)
    layers = [stored(128, 64, E8P[2], 0), stored(128, 64, E8P[4], 1)]
    module: Any = nn.Module()
    slots.create(module)
    slots.expect_norm(module, torch.ones(64))
    before = {name: tensor.data_ptr() for name, tensor in module.named_buffers()}
    assert set(before) == {"in_scale_after_norm"}
    for tensors, shard in zip(layers, ["q", "k"], strict=True):
        for suffix, tensor in tensors.items():
            getattr(module, suffix).weight_loader(getattr(module, suffix), tensor, shard)
    slots.finish(module)
    weight = torch.randn(64, generator=torch.Generator().manual_seed(3))
    slots.follow_norm(module, weight)
    assert before["in_scale_after_norm"] == module.in_scale_after_norm.data_ptr()
    assert set(dict(module.named_buffers())) == {"in_scale_after_norm", "codebook"}
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    normed = torch.nn.functional.rms_norm(x, (64,), weight, 1e-5)
    for i, (part, tensors) in enumerate(zip(slots.parts, layers, strict=True)):
        given = slots.kernel_args(module, i, after_norm=True)
        got = part.ops.linear(part.format, x, given, None, None, 1e-5, False, False)
        torch.testing.assert_close(got, whole(tensors, part.format, normed), rtol=1e-4, atol=1e-4)
