"""What ptxas gives the kernels of a program, for the feedback to the coloring: no GPU is needed, only NVRTC.

The binaries land in the cache from which the kernels are loaded, so where kernels are built anyway this is no work.
"""

from __future__ import annotations

from collections.abc import Sequence

from hlofuse.codegen.dialect import CUDA
from hlofuse.codegen.kernel import KernelText
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.feedback import Measured
from hlofuse.runtime.kernel_cache import default_cache
from hlofuse.runtime.nvrtc import CudaBinary, CudaSource, compile_many


def measure_kernels(texts: Sequence[KernelText | None], device: DeviceSpec) -> list[Measured | None]:
    """Registers and spills of each kernel; None where there is no text or it does not compile."""
    sources = {text.symbol: CudaSource(text.symbol, text.text) for text in texts if text is not None}
    built = compile_many(list(sources.values()), device.arch, default_cache(), CUDA.prelude)
    return [None if text is None else _measured(text, built[text.symbol], device) for text in texts]


def _measured(text: KernelText, binary: object, device: DeviceSpec) -> Measured | None:
    if not isinstance(binary, CudaBinary):
        return None
    found = binary.kernels[text.symbol]
    limit = min(device.max_registers, device.registers_per_sm // text.threads)
    return Measured(found.registers, max(found.spill_stores, found.spill_loads), limit)
