from allyouneed.kernels.preload import wait_for_libraries

wait_for_libraries()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: E402

# arguments that change with the length of a text: a kernel would be compiled again for 1 and for multiples of 16
TEXT_SIZES = ("time", "chunks", "share", "segments", "log_row", "log_head")


@triton.jit
def await_inputs(OVERLAP: tl.constexpr):
    """Where kernels overlap (`has_pdl`): let the next one begin, and wait for what the previous one writes."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
