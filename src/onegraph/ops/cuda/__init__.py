"""CUDA C++ kernels, compiled by NVRTC on the user's machine. Kernels only: of ours this room imports Triton's alone."""
