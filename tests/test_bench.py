"""The measuring functions: that they measure what they say, on a tiny model; figures are for a GPU to give."""

import pytest
import torch

from onegraph.engine.bench import bench_linear, bench_step
from tiny_decoder import TinyDecoder


def test_step_rows_count_what_ran() -> None:
    rows = list(bench_step(TinyDecoder(), batches=(1, 3), context=5, steps=8, name="tiny"))
    assert [(row["batch"], row["mode"], row["name"]) for row in rows] == [(1, "eager", "tiny"), (3, "eager", "tiny")]
    for row in rows:
        assert row["steps"] == 8
        assert row["tokens_per_second"] > 0
        assert row["ms_per_step"] == pytest.approx(1e3 * row["batch"] / row["tokens_per_second"], rel=1e-2)
        assert row["torch"] == torch.__version__


def test_a_context_too_long_is_refused() -> None:
    model = TinyDecoder()
    with pytest.raises(ValueError, match="positions; the model has"):
        list(bench_step(model, context=model.max_context, steps=8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_kernels_are_not_timed_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="CUDA GPU"):
        next(iter(bench_linear(device="cpu")))
    with pytest.raises(ValueError, match="none that torch sees"):
        next(iter(bench_linear(device="cuda")))


@pytest.mark.gpu
def test_linear_rows_stay_under_their_roof() -> None:
    rows = list(bench_linear(((1024, 2048),), tokens=(1,), bits=(2, 4)))
    assert [row["bits"] for row in rows] == [16, 2, 4]
    for row in rows:
        assert 0 < row["roof_us"] < row["us"], "faster than the memory: the weights came out of the cache"
