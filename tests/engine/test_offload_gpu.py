"""The prefix cache in host memory on a GPU: order of copies and steps, and the tokens of captured steps."""

from contextlib import closing

import pytest
import torch

from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.runtime.offload import Arrival, HostBuffer
from test_offload import TEXTS, ask
from test_schedule import whole
from tiny_decoder import TinyDecoder

pytestmark = pytest.mark.gpu

LONG = 20_000_000  # clock cycles: about 10 ms
PARAMS = SamplingParams(max_tokens=12)


def test_copies_and_the_callers_stream_keep_their_order() -> None:
    """What is saved is what a long kernel in front will have written, whatever overwrites it at once; what is loaded
    goes over what a long kernel in front writes; a slot that is read is not written over before."""
    tensors = [torch.zeros(96, 64, 16, device="cuda"), torch.zeros(4, 96, 40, device="cuda").transpose(0, 1)]
    store, places = HostBuffer(tensors, 96), [*range(0, 96, 2)]
    assert store._host.is_pinned()
    for value in (1.0, 2.0, 3.0, 4.0):
        torch.cuda._sleep(LONG)
        for tensor in tensors:
            tensor.fill_(value)
        store.save(places, range(48))
        for tensor in tensors:
            tensor.fill_(-1)
        torch.cuda._sleep(LONG)
        for tensor in tensors:
            tensor.fill_(-2)
        arrival = store.load(range(48), [*range(48)])
        store.save([95] * 48, range(48))  # over what is being read
        assert value < 4 or not arrival.done, "the host does not wait, but where it allocates page-locked memory"
        arrival.join()
        for tensor in tensors:
            assert (tensor[:48] == value).all()
            assert (tensor[48:] == -2).all()
        assert arrival.done


@pytest.mark.parametrize("capture", [None, False])
def test_what_is_evicted_comes_back(capture: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each copy takes longer than many steps."""
    options = {"max_batch": 3, "max_context": 64, "page_size": 4, "chunk": 8, "capture": capture}
    model = TinyDecoder(device="cuda:0")
    load = HostBuffer.load

    def slow(store: HostBuffer, slots: list[int], places: list[int]) -> Arrival:
        with store._on_side_stream():
            torch.cuda._sleep(LONG)
        return load(store, slots, places)

    monkeypatch.setattr(HostBuffer, "load", slow)
    plain, made = Engine(model, **options), Engine(model, **options, pages=1 + 24, kv_offloading_size=0.001)
    with plain.executor.running(), closing(plain.scheduler.open(share=False)):
        wanted = ask(plain, TEXTS * 3, PARAMS)
    with made.executor.running(), closing(made.scheduler.open()) as scheduler:
        assert ask(made, TEXTS * 3, PARAMS) == wanted
        requests = [made.request(text, PARAMS) for text in TEXTS * 3]  # together, in three rows
        for request in requests:
            scheduler.add(request)
        while not scheduler.idle:
            scheduler.step()
        assert [request.output for request in requests] == wanted
        assert made.stats.restored_tokens
    assert whole(made)
