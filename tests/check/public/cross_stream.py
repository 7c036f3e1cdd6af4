# sglang-omni#1369: the output is cloned on another stream, and the next replay does not wait for that.
import sys

import torch

good = sys.argv[1] == "good"
x = torch.ones(4, 8, device="cuda")
w = torch.eye(8, device="cuda")
other = torch.cuda.Stream()
done = torch.cuda.Event()
for _ in range(3):
    o = torch.relu(x @ w)
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    o = torch.relu(x @ w)
kept = []
for i in range(4):
    if good and i:
        torch.cuda.current_stream().wait_event(done)
    x.fill_(float(i))
    g.replay()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        kept.append(o.clone())
        done.record(other)
torch.cuda.synchronize()
print([k[0, 0].item() for k in kept])
