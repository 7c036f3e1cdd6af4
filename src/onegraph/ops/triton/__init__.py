"""Triton kernels only. They import nothing of ours."""
