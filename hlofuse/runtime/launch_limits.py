"""What CUDA's launches allow: checked before a kernel is loaded, so that a breach has a name."""

from __future__ import annotations

from hlofuse.codegen.kernel import KernelText

MAX_GRID_X = 2**31 - 1
MAX_THREADS = 1024
MAX_PARAMETER_BYTES = 32764
POINTER_BYTES = 8


def launch_problem(text: KernelText, shared_optin: int) -> str | None:
    """Why a kernel cannot be launched on a device whose blocks get at most `shared_optin` bytes of shared memory."""
    parameters = POINTER_BYTES * (len(text.arguments) + 1)    # and the counters
    if text.blocks > MAX_GRID_X:
        return f"{text.blocks} blocks, a launch has at most {MAX_GRID_X}"
    if text.threads > MAX_THREADS:
        return f"{text.threads} threads in a block, a block has at most {MAX_THREADS}"
    if parameters > MAX_PARAMETER_BYTES:
        return f"{parameters} bytes of parameters, a launch has at most {MAX_PARAMETER_BYTES}"
    if text.dynamic_shared_bytes > shared_optin:
        return f"{text.dynamic_shared_bytes} bytes of shared memory, a block of this device has at most {shared_optin}"
    return None
