"""What torch can do on this CPU: a probe in a process of its own, and the setting under which it works.

On some virtual machines the CPU announces AMX, and the system doesn't allow it. There torch's first product in bfloat16
fails ("could not create a primitive") or kills the process, and after it float32 convolutions fail as well. oneDNN,
which computes these products, uses older instructions if ``ONEDNN_MAX_CPU_ISA`` says so. It reads the variable when it
is first used, so it has to be set before that.

This module needs the standard library alone: the tests load it by its path, before torch is imported.
"""

import os
import subprocess
import sys

__all__ = ["ANSWER", "NOTHING", "PLAIN", "SETTINGS", "has_half_products", "prepare", "probe", "reason"]

ANSWER = "ORTHOCOND_CPU"
"""Environment variable with the probe's answer; if it is set, nothing is probed."""
PLAIN = "plain"
"""Answer: everything works as it is."""
NOTHING = "none"
"""Answer: products of half precision work under no setting."""
SETTINGS = ("AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
"""The other answers: values of ``ONEDNN_MAX_CPU_ISA``, the strongest first."""

# A product, a convolution and a step of Muon in half precision, then a convolution in float32, which fails after a
# broken one in bfloat16. Wrong values count as failures.
_WORK = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
A, B = torch.randn(64, 48), torch.randn(48, 64)
x, weight = torch.randn(2, 8, 16, 16), torch.randn(16, 8, 3, 3)
product, image = A.double() @ B.double(), F.conv2d(x.double(), weight.double())
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for got, true in ((A.to(dtype) @ B.to(dtype), product), (F.conv2d(x.to(dtype), weight.to(dtype)), image)):
        assert (got.double() - true).norm() < 0.05 * true.norm(), dtype
if hasattr(torch.optim, "Muon"):
    matrix = torch.nn.Parameter(A.clone())
    matrix.grad = A.clone()
    torch.optim.Muon([matrix]).step()
    assert matrix.isfinite().all()
assert (F.conv2d(x, weight).double() - image).norm() < 1e-4 * image.norm()
"""


def prepare() -> str:
    """Choose what works on this CPU, for this process and for those it starts, and return the probe's answer.

    The answer is kept in the environment, so that a run asks once. Call it before torch computes anything.
    """
    answer = os.environ.get(ANSWER) or probe()
    if answer not in (PLAIN, NOTHING, *SETTINGS):
        raise ValueError(f"{ANSWER} is one of {', '.join((PLAIN, *SETTINGS, NOTHING))}, got {answer!r}; unset it.")
    os.environ[ANSWER] = answer
    if answer in SETTINGS:
        os.environ["ONEDNN_MAX_CPU_ISA"] = answer
    return answer


def has_half_products() -> bool:
    """Return whether torch can multiply in half precision here, after `prepare`."""
    return prepare() != NOTHING


def reason() -> str:
    """Return why something that needs products of half precision isn't done, as part of a sentence."""
    return f"torch can't multiply in half precision on this CPU, under no ONEDNN_MAX_CPU_ISA of {', '.join(SETTINGS)}"


def probe() -> str:
    """Find out under which setting torch works on this CPU: `PLAIN`, one of `SETTINGS`, or `NOTHING`.

    Each trial is a process of its own, which may die of a signal. On most machines the first one succeeds: the probe
    then costs an import of torch.
    """
    if _works({}):
        return PLAIN
    return next((setting for setting in SETTINGS if _works({"ONEDNN_MAX_CPU_ISA": setting})), NOTHING)


def _works(setting: dict[str, str]) -> bool:
    try:
        trial = subprocess.run(
            [sys.executable, "-c", _WORK], env=os.environ | setting, capture_output=True, check=False, timeout=300
        )
    except subprocess.TimeoutExpired:
        return False
    return trial.returncode == 0


if __name__ == "__main__":
    print(prepare())
