import sys

import torch

good = sys.argv[1] == "good"
x = torch.ones(4, 8, device="cuda")
w = torch.eye(8, device="cuda")
host = torch.zeros(4, 8, pin_memory=True)
done = torch.cuda.Event()
for _ in range(3):
    o = torch.relu(x @ w)
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    o = torch.relu(x @ w)
for i in range(4):
    x.fill_(float(i))
    g.replay()
    host.copy_(o, non_blocking=True)
    done.record()
    if good:
        done.synchronize()
    print(host.tolist()[0][0], host[0, 0].item())
