"""hlofuse: an XLA-style optimizer that turns JAX functions into fused, readable kernels."""

from __future__ import annotations

from . import errors, stages
from .api import jit
from .config import Options
from .errors import HlofuseError, HlofuseWarning

__version__ = "0.1.0"

__all__ = ["HlofuseError", "HlofuseWarning", "Options", "__version__", "errors", "jit", "stages"]
