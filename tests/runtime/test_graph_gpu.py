"""The Runner on a GPU: what was captured is what runs, on every input, stream and device."""

import gc
import itertools

import pytest
import torch
from torch import nn

from onegraph.runtime.graph import CaptureError, GraphPool, Runner, split_point
from onegraph.runtime.prove import prove
from onegraph.runtime.transfer import Download, Upload

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


class Net(nn.Module):
    """Matrix products large enough for cuBLAS to want a workspace, with a split point between them."""

    def __init__(self, device=DEVICE, width=256):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.a, self.b = ((torch.randn(width, width, generator=g) / 16).to(device) for _ in range(2))

    def forward(self, x):
        h = torch.relu(x @ self.a)
        h = split_point("middle", self.middle, h, 0.5)
        return {"out": h @ self.b, "mean": h.mean(1)}

    def middle(self, h, factor):
        return torch.tanh(h) * factor + h.amax(1, keepdim=True)


def values(rows, seed, device="cpu", width=256):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("split", [(), ("middle",)], ids=["full", "split"])
def test_replay_equals_eager_in_every_bucket(split):
    net = Net()
    runner = Runner(net, {"x": torch.zeros(16, 256, device=DEVICE)}, [1, 2, 8, 16], split=split)
    assert runner.mode == ("split" if split else "captured")
    cases = [{"x": values(rows, rows)} for rows in (16, 1, 5, 2, 9, 3)]
    assert prove(runner, cases) == []


def test_split_equals_full():
    net = Net()
    inputs = [values(rows, rows) for rows in (4, 3, 1)]
    full = Runner(net, {"x": torch.zeros(4, 256, device=DEVICE)}, [1, 4])
    split = Runner(net, {"x": torch.zeros(4, 256, device=DEVICE)}, [1, 4], split="middle")
    for x in inputs:
        expected = {name: t.clone() for name, t in full(x=x).items()}
        got = split(x=x)
        assert all(got[name].equal(expected[name]) for name in expected)


def test_proof_fails_for_a_step_that_bakes_a_number_in():
    count = itertools.count()
    runner = Runner(lambda x: x * next(count), {"x": torch.zeros(4, device=DEVICE)})
    assert prove(runner, [{"x": torch.ones(4)}, {"x": torch.full((4,), 2.0)}])


def test_buckets_share_one_pool():
    """Seven buckets take hardly more than the largest alone: each reuses the memory of the one before."""

    def reserved(buckets):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(DEVICE)
        runner = Runner(net, {"x": inputs}, buckets)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(DEVICE) - before, runner

    net = Net(width=1024)
    inputs = torch.zeros(8192, 1024, device=DEVICE)
    Runner(net, {"x": inputs}, [8192])  # handles and workspaces
    one, _keep = reserved([8192])
    all_of_them, _keep_too = reserved([64, 512, 1024, 2048, 4096, 8192])
    assert one >= 3 * inputs.nbytes, "the case must need memory worth sharing"
    # Outputs stay allocated, so each further bucket adds its own (half of the next): everything else is shared.
    assert all_of_them <= one + inputs.nbytes + (64 << 20)


def test_hundreds_of_chained_replays_do_not_grow_memory():
    def step(x, n):
        n.add_(1)
        x.copy_(torch.tanh(x @ net.a) + n[:, None] * 1e-3)
        return x * 1

    net = Net()
    start = values(4, 1)
    inputs = {"x": torch.zeros(4, 256, device=DEVICE), "n": torch.zeros(4, device=DEVICE)}
    runner = Runner(step, inputs, [4])
    assert inputs["n"].eq(0).all(), "warm-up must leave no trace"
    x, n = start.to(DEVICE), torch.zeros(4, device=DEVICE)
    for _ in range(300):
        eager = step(x, n)
    runner.load(x=start, n=torch.zeros(4))
    runner.replay(4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)
    for _ in range(299):
        out = runner.replay(4)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)) == before
    assert out.equal(eager)
    assert inputs["n"].eq(300).all()


def test_uploads_may_be_rewritten_at_once():
    """More uploads than slots while the device is busy: none may see the next one's values."""
    target = torch.zeros(1 << 16, device=DEVICE)
    upload = Upload(target)
    host = torch.empty(1 << 16)
    seen = []
    busy = torch.randn(4096, 4096, device=DEVICE)
    for n in range(12):
        busy = torch.tanh(busy @ busy)  # keeps the stream behind the host
        host.fill_(n)
        upload(host)
        seen.append(target.clone())
    host.fill_(-1)
    assert [t.unique().tolist() for t in seen] == [[n] for n in range(12)]


def test_downloads_overlap_with_what_follows():
    source = torch.zeros(1 << 16, device=DEVICE)
    download = Download(source)
    busy = torch.randn(4096, 4096, device=DEVICE)
    waiting = []
    for n in range(10):
        busy = torch.tanh(busy @ busy)
        source.fill_(n)
        waiting.append(download.start(source[:100]))
        if len(waiting) == 2:
            assert waiting.pop(0)().unique().tolist() == [n - 1]


def test_callers_on_any_stream_see_their_own_results():
    net = Net()
    runner = Runner(net, {"x": torch.zeros(8, 256, device=DEVICE)}, [8])
    expected = [net(values(8, n, DEVICE))["out"].clone() for n in range(4)]
    streams = [torch.cuda.Stream(DEVICE) for _ in range(4)]
    results = []
    torch.cuda.synchronize()
    for n, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            x = values(8, n, DEVICE)
            torch.cuda._sleep(2_000_000)
            results.append(runner(x=x * 1)["out"].clone())
        for other in streams:  # one Runner, one set of buffers: its calls follow each other
            other.wait_stream(stream)
    torch.cuda.synchronize()
    assert all(r.equal(e) for r, e in zip(results, expected, strict=True))


def test_a_failed_capture_names_the_line_and_leaves_the_device_usable():
    def step(x):
        y = x * 2
        return y + 1 if y.sum().item() > 0 else y  # the culprit

    with pytest.raises(CaptureError) as caught:
        Runner(step, {"x": torch.zeros(8, 256, device=DEVICE)}, [8])
    message = str(caught.value)
    assert "the culprit" in message
    assert __file__ in message
    assert "onegraph check" in message
    del caught
    torch.cuda.synchronize()
    net = Net()
    assert prove(Runner(net, {"x": torch.zeros(8, 256, device=DEVICE)}, [8]), [{"x": values(8, 1)}]) == []


def test_a_split_point_takes_what_cannot_be_captured():
    def step(x):
        largest = split_point("host", lambda h: h / max(h.abs().max().item(), 1.0), x * 3)
        return largest + 1

    with pytest.raises(CaptureError):
        Runner(step, {"x": torch.zeros(8, 256, device=DEVICE)}, [8])
    runner = Runner(step, {"x": torch.zeros(8, 256, device=DEVICE)}, [8], split="host")
    assert prove(runner, [{"x": values(8, n) * (n + 1)} for n in range(3)]) == []


def test_an_empty_graph_is_an_error():
    constant = torch.zeros(3, device=DEVICE)
    with pytest.raises(CaptureError, match="empty"):
        Runner(lambda x: constant, {"x": torch.zeros(3, device=DEVICE)})


def test_random_numbers_are_drawn_anew_in_each_replay():
    runner = Runner(lambda x: x + torch.rand_like(x), {"x": torch.zeros(1000, device=DEVICE)})
    first = runner(x=torch.zeros(1000)).clone()
    assert not first.equal(runner(x=torch.zeros(1000)))


def test_the_device_in_the_name_decides_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    net = Net("cuda:1")
    runner = Runner(net, {"x": torch.zeros(8, 256, device="cuda:1")}, [2, 8])
    assert runner.pool.stream.device == torch.device("cuda:1")
    assert prove(runner, [{"x": values(8, 1)}, {"x": values(1, 2)}]) == []
    first = Runner(Net("cuda:0"), {"x": torch.zeros(8, 256, device="cuda:0")}, [2, 8])
    assert prove(first, [{"x": values(8, 1)}, {"x": values(1, 2)}]) == []
    assert torch.cuda.current_device() == 0


def test_runners_share_a_pool_one_after_another():
    pool, net = GraphPool(DEVICE), Net()
    a = Runner(net, {"x": torch.zeros(8, 256, device=DEVICE)}, [8], pool=pool)
    b = Runner(lambda x: net(x)["out"].sin(), {"x": torch.zeros(8, 256, device=DEVICE)}, [8], pool=pool)
    for n in range(4):
        x = values(8, n)
        expected = net(x.to(DEVICE))["out"]
        assert a(x=x)["out"].equal(expected)
        assert b(x=x).equal(expected.sin())
