# pytorch#195397: a CUDAGraph that dies while another one is captured: reset is not permitted while capturing.
import gc
import sys

import torch

mode = sys.argv[1]
x = torch.ones(8, device="cuda")
s = torch.zeros(8, device="cuda")


class Box:
    pass


for _ in range(3):
    y = x * 2
    z = y + 1
    o = s + 1


def make():
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        o = s + 1
    return g, o


old, o = make()
old.replay()
g2 = torch.cuda.CUDAGraph()
if mode == "cycle":
    gc.disable()
    box = Box()
    box.g = old
    box.me = box
    del old, box
if mode == "good":
    del old
    gc.collect()
with torch.cuda.graph(g2):
    y = x * 2
    if mode == "del":
        del old
    if mode == "reset":
        old.reset()
    if mode == "cycle":
        gc.collect()
    z = y + 1
for i in range(3):
    x.fill_(float(i))
    g2.replay()
    print(z[0].item())
