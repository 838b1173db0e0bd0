"""Whether a linear layer quantised on a device computes there, as a CUDA graph too, about what the plain one does."""

from __future__ import annotations

import torch
from torch import nn

from specbench.errors import first_line
from specbench.models.acceleration import OFF
from specbench.models.fixed_pass import Tensors
from specbench.models.passes import Passes
from specbench.models.quantize import compute_dtype, quantise

INPUTS, OUTPUTS, TOKENS = 2048, 64, 4
MOST_DIFFERENCE = 0.2  # of the outputs, over their size; int4, the coarsest scheme, makes it 0.07


def check_scheme(scheme: str, device: torch.device, captured: bool | None = None) -> str | None:
    """What is wrong with a layer quantised to `scheme` on `device`, or None.

    Args:
        captured: run it as a CUDA graph as well; None: if the device has them.
    """
    try:
        return _check(scheme, device, device.type == "cuda" if captured is None else captured)
    except Exception as error:  # noqa: BLE001 - torchao, its kernels and the driver fail in many ways
        return first_line(error)


@torch.no_grad()
def _check(scheme: str, device: torch.device, captured: bool) -> str | None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
        tokens = torch.randn(1, TOKENS, INPUTS)
    dtype = compute_dtype(scheme, "auto", device)
    net, tokens = net.to(device, dtype), tokens.to(device, dtype)
    plain = net(tokens)
    quantise(net, scheme)

    def compute(inputs: Tensors, _length: int) -> Tensors:
        return {"out": net(inputs["tokens"])}

    passes = Passes("quantised layer", off=None if captured else OFF)
    for way in ("as it is", "as a CUDA graph")[: 1 + captured]:  # a pass is captured the second time
        found = passes.run(scheme, 0, compute, {"tokens": tokens}, 0)["out"]
        apart = float((found - plain).float().norm() / plain.float().norm())
        if not apart <= MOST_DIFFERENCE:  # NaN too
            return f"run {way}, its outputs are off by {apart:.0%}"
    return f"no CUDA graph of it can be made ({passes.off})" if captured and passes.off else None
