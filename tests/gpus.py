"""Several GPUs, for tests: which there are, and graphs on all of them."""

from typing import Any

import pytest
import torch

from onegraph.nn.peers import Peers


def devices(count: int) -> list[torch.device]:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return [torch.device("cuda", i) for i in range(count)]


class Chains:
    """On each GPU a graph of several exchanges, one behind the other."""

    def __init__(self, peers: Peers, work: Any) -> None:
        self.peers, self.streams = peers, [torch.cuda.Stream(device) for device in peers.devices]
        self.graphs, self.out = [], []
        for i, device in enumerate(peers.devices):
            with torch.cuda.device(device), torch.cuda.stream(self.streams[i]):
                work(peers.rank(i))  # alone: nobody is armed
                torch.cuda.synchronize(device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self.streams[i]):
                    self.out.append(work(peers.rank(i)))
                self.graphs.append(graph)
        peers.arm()

    def replay(self, ranks: Any = None) -> None:
        for i in ranks or range(len(self.graphs)):
            with torch.cuda.device(self.peers.devices[i]), torch.cuda.stream(self.streams[i]):
                self.graphs[i].replay()

    def wait(self) -> None:
        for device in self.peers.devices:
            torch.cuda.synchronize(device)
