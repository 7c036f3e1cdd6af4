"""Runtime: static buffers, buckets, capture and replay of any callable; it never names a model."""
