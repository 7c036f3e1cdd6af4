"""Damages what people feed onegraph and watches how it ends: one clear line and a nonzero exit, or success."""
