// A kernel that does nothing, which the driver is asked about: how many clusters of blocks that take an SM each it holds.

extern "C" __global__ void occupancy() {}
