"""One adapter per mlx-lm cache: the only code that moves a layer back, forwards or aside."""

from ds4cli.caches.adapter import CursorAdapter, LayerAdapter
from ds4cli.caches.build import (
    UnsupportedCache,
    adapt,
    build_caches,
    check_kv_bits,
    check_kv_group,
    nest,
)

__all__ = [
    "CursorAdapter",
    "LayerAdapter",
    "UnsupportedCache",
    "adapt",
    "build_caches",
    "check_kv_bits",
    "check_kv_group",
    "nest",
]
