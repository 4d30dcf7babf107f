"""Fusion: which instructions share a kernel, decided by graph coloring under a cost model."""
