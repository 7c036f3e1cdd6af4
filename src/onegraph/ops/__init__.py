"""Ops: tensor in, tensor out, no state. The reference and the kernel of each stand under one name."""
