"""Ops: tensor in, tensor out, no state. The reference and the kernel of each stand under one name."""

__capturable__ = ("onegraph::*",)  # for `onegraph check`, whose simulation runs the references in the kernels' place
