"""The record of one call: its place in the code, and the measurements of its matrix and its gradients."""

import cmath
import functools
import linecache
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orthocond._core.private import graph_task_id, transforms_are_active
from orthocond.diagnosis._flow import Use
from orthocond.diagnosis._measure import Gradient, Spread, eigen_gradient, singular_gradient, spread
from orthocond.linalg import covariance
from orthocond.linalg._smaller_side import spectral_of_samples

__all__ = [
    "MEASURED",
    "Call",
    "Place",
    "begin",
    "entry_of",
    "is_ours",
    "matrix_of",
    "measure",
    "measure_failure",
    "measure_gradient",
    "outputs_of",
]

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_WATCHING = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}")
"""The frames between a call and the mode that observes it: torch, and other modes of this package."""

_KINDS: dict[Any, tuple[str, str]] = {
    torch.linalg.eigh: ("torch.linalg.eigh", "eigh"),
    torch.linalg.eigvalsh: ("torch.linalg.eigvalsh", "eigvalsh"),
    torch.linalg.svd: ("torch.linalg.svd", "svd"),
    torch.linalg.svdvals: ("torch.linalg.svdvals", "svdvals"),
    torch.linalg.pinv: ("torch.linalg.pinv", "pinv"),
    torch.linalg.cholesky: ("torch.linalg.cholesky", "cholesky"),
    torch.linalg.cholesky_ex: ("torch.linalg.cholesky_ex", "cholesky"),
    torch.svd: ("torch.svd", "svd"),
    torch.Tensor.svd: ("torch.Tensor.svd", "svd"),
    torch.pinverse: ("torch.pinverse", "pinv"),
    torch.Tensor.pinverse: ("torch.Tensor.pinverse", "pinv"),
    torch.cholesky: ("torch.cholesky", "cholesky"),
    torch.Tensor.cholesky: ("torch.Tensor.cholesky", "cholesky"),
}
MEASURED = ("L", "S", "factor", "info")
"""The outputs of a decomposition that `measure` reads, by the names of `outputs_of`."""


class Place(NamedTuple):
    """The place of a call in the code."""

    module: str
    path: str
    line: int
    argument: str
    """What is decomposed, as the source line has it."""

    @property
    def source(self) -> str:
        """The line of code as it is shown in the working directory; nothing if it is unknown."""
        return f"{_shown(self.path)}:{self.line}" if self.path else ""


@dataclass(eq=False)
class Call:
    """One call of a decomposition, and its measurements."""

    function: str
    kind: str
    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    unit: float
    """Relative precision of the decomposition."""
    unit_behind: float = 0.0
    """Relative precision of autocast, where it is on."""
    options: dict[str, Any] = field(default_factory=dict)
    finite_input: bool = True
    symmetric: bool = False
    requires_grad: bool = False
    failure: str = ""
    values: Tensor | None = None
    """Eigenvalues or singular values ``(b, n)`` in float64."""
    estimated: bool = False
    """Whether ``values`` are estimates of the smallest and the largest alone, ``(b, 2)``."""
    spread: Spread | None = None
    gradients: list[Gradient] = field(default_factory=list)
    during_backward: bool = False
    of_samples: bool = False
    """Whether the call was given samples ``(..., n, num_samples)``, and decomposes their covariance."""
    use: Use = field(default_factory=Use)
    """What was made of the eigenvalues."""

    @property
    def size(self) -> int:
        """The larger side of a matrix."""
        return max(self.shape[-2:])


def entry_of(function: Any, args: tuple[Any, ...]) -> tuple[str, str] | None:
    """Return name and kind of a decomposition, and of a function of `orthocond.linalg` or the layer that called it."""
    if (entry := _KINDS.get(function)) is not None:
        return entry
    if not getattr(function, "__module__", None) or not function.__module__.startswith("orthocond.linalg"):
        return None
    caller = args[0] if args and isinstance(args[0], str) else function.__name__
    return f"orthocond.{'nn' if caller[0].isupper() else 'linalg'}.{caller}", "ours"


def is_ours(frame: FrameType | None) -> bool:
    """Return whether a call is in this library."""
    while frame is not None and frame.f_code.co_filename.startswith(_WATCHING):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OURS)


def _place(frame: FrameType | None, names: dict[int, str], function: str) -> Place:
    """Return the first line outside torch and this library, and the innermost module around it."""
    line, module = None, ""
    while frame is not None and not (line and module):
        path = frame.f_code.co_filename
        if line is None and not path.startswith((_OURS, *_WATCHING)):
            line = (path, frame.f_lineno)
        # f_locals keeps what it finds alive as long as the frame: ask methods alone, which end soon.
        if not module and frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            module = names.get(id(owner), type(owner).__name__) if isinstance(owner, nn.Module) else ""
        frame = frame.f_back
    return Place(module, "", 0, "A") if line is None else Place(module, *line, _argument_at(*line, function))


@functools.lru_cache(maxsize=1024)
def _argument_at(path: str, number: int, function: str) -> str:
    return _argument(linecache.getline(path, number), function)


def _shown(path: str) -> str:
    inside = os.path.relpath(path) if os.path.isabs(path) else path
    return path if inside.startswith("..") else inside


def _argument(line: str, function: str) -> str:
    """Return the expression that is decomposed in a line of code, or A if it is unknown.

    >>> _argument("U, S, V = torch.svd(self.cov + eps)", "torch.svd")
    'self.cov + eps'
    """
    name = function.rpartition(".")[2]
    before, found, after = line.partition(f"{name}(")
    if not found:
        return "A"
    if function.startswith("torch.Tensor."):
        owner = before.replace("=", " ").split()[-1:] or ["A."]
        return owner[0].removesuffix(".") if owner[0].endswith(".") else "A"
    depth = 0
    for position, character in enumerate(after):
        depth += character in "([{"
        depth -= character in ")]}"
        if depth < 0 or (depth == 0 and character == ","):
            argument = after[:position].strip()
            return argument if 0 < len(argument) <= 40 and "=" not in argument else "A"
    return "A"


def begin(
    called: Any,
    entry: tuple[str, str],
    frame: FrameType,
    names: dict[int, str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call | None:
    """Return the record of a call that is about to be made, or None for one that can't be inspected."""
    function, kind = entry
    A = matrix_of(args, kwargs)
    of_samples = called is spectral_of_samples
    if transforms_are_active() or type(A) not in (Tensor, nn.Parameter):
        raise NotImplementedError(f"{function} inside a transform of torch.func, or of a tensor subclass")
    if A.is_meta or A.ndim < 2 or not A.numel() or not (A.is_floating_point() or A.is_complex()):
        return None
    return Call(
        function,
        kind,
        _place(frame, names, function),
        (*A.shape[:-1], A.shape[-2]) if of_samples else tuple(A.shape),
        A.dtype,
        A.device,
        torch.finfo(A.dtype).eps,
        _autocast_unit(A.device.type),
        {
            **{name: option for name, option in kwargs.items() if not isinstance(option, Tensor)},  # they hold graphs
            "functions": next((X for X in args if isinstance(X, tuple)), ()),
            **(_tolerances(function, A, args, kwargs) if kind == "pinv" else {}),
        },
        during_backward=graph_task_id() != -1,
        of_samples=of_samples,
    )


def matrix_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the matrix among the arguments of a decomposition."""
    return next((X for X in (*args, *kwargs.values()) if isinstance(X, Tensor)), None)


def _tolerances(function: str, A: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tolerances of a pseudo-inverse ``(b, 1)`` in float64, with torch's defaults; ``rcond`` is ``rtol``."""

    def of_each(tolerance: Any) -> Tensor:
        tolerance = torch.as_tensor(tolerance, dtype=torch.float64, device="cpu")
        column: Tensor = tolerance.expand(torch.broadcast_shapes(tolerance.shape, A.shape[:-2])).reshape(-1, 1)
        if len(column) != A[..., 0, 0].numel():
            raise NotImplementedError(f"{function} with several tolerances for one matrix")
        return column.clone()  # its owner may change it before it is read

    relative = (*args[1:2], kwargs.get("rcond"), kwargs.get("rtol"))
    rtol = next((tolerance for tolerance in relative if tolerance is not None), None)
    atol = of_each(0.0 if kwargs.get("atol") is None else kwargs["atol"])
    if rtol is not None:
        return {"atol": atol, "rtol": of_each(rtol)}
    # torch.pinverse keeps the default of its early days, whatever the dtype.
    default = 1e-15 if function.endswith("pinverse") else max(A.shape[-2:]) * torch.finfo(A.dtype).eps
    return {"atol": atol, "rtol": of_each(default).masked_fill(atol > 0, 0.0)}


def _autocast_unit(device: str) -> float:
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.finfo(torch.get_autocast_dtype(device)).eps
    return 0.0


def outputs_of(call: Call, result: Any) -> dict[str, Tensor]:
    """Return the outputs of a decomposition by name."""
    if call.kind == "eigh":
        return {"L": result[0], "U": result[1]}
    if call.kind == "svd":
        U, S, V = result
        # torch.svd returns V, not its adjoint; its node is that of U and S.
        return {"S": S, "U": U, "Vh": V if call.function == "torch.linalg.svd" else V.mH}
    if call.kind == "ours":
        return _outputs_of_ours(result)
    if call.function.endswith("cholesky_ex"):
        return {"factor": result[0], "info": result[1]}
    return {{"eigvalsh": "L", "svdvals": "S", "cholesky": "factor"}.get(call.kind, "result"): result}


def _outputs_of_ours(result: Any) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"result": result}
    if isinstance(result[0], tuple):  # the roots, the eigenvalues where the solver has them, and more about the matrix
        results, eigenvalues, *_ = result
        return {**({} if eigenvalues is None else {"L": eigenvalues}), **_outputs_of_ours(results)}
    return {f"result {number}": output for number, output in enumerate(result) if isinstance(output, Tensor)}


def _wide(X: Tensor, ndim: int) -> Tensor:
    """Return a batch ``(b, ...)`` on the CPU in float64 or complex128."""
    X = X.detach().to("cpu", torch.complex128 if X.is_complex() else torch.float64)
    return X.reshape(-1, *X.shape[-ndim:])


def _is_finite(A: Tensor) -> bool:
    return cmath.isfinite(A.sum().item()) or bool(torch.isfinite(A).all())  # the sum is cheap


def measure(call: Call, A: Tensor, outputs: dict[str, Tensor]) -> None:
    """Measure the matrix of a call, by the eigenvalues that the call gives where it gives them."""
    call.finite_input = _is_finite(A)
    if not call.finite_input:
        return
    unit = _matrix_unit(A, call)
    if "L" in outputs or "S" in outputs:
        call.values = _wide(outputs["L"] if "L" in outputs else outputs["S"], 1)
    elif call.of_samples:
        call.values = torch.linalg.eigvalsh(covariance(_wide(A, 2)))
    elif call.kind == "pinv" or A.shape[-1] != A.shape[-2]:
        call.values = _wide(torch.linalg.svdvals(A.detach()), 1)
    elif call.kind == "cholesky":
        if "info" in outputs and bool((outputs["info"] > 0).any()):
            call.failure = "the matrix is not positive definite"
            call.values = _wide(torch.linalg.eigvalsh(A.detach(), "U" if call.options.get("upper") else "L"), 1)
        else:
            call.values = _cholesky_values(A.detach(), outputs["factor"].detach(), call.options)
            call.estimated = True
    else:
        call.values = torch.linalg.eigvalsh(_wide(A, 2))
    if call.kind == "svd":
        call.symmetric = A.shape[-1] == A.shape[-2] and bool(torch.equal(A, A.mH))
    call.spread = spread(call.values, call.size, unit)


def _matrix_unit(A: Tensor, call: Call) -> float:
    """Return the precision that a matrix was computed in: that of float32 if float64 holds nothing but float32."""
    if A.dtype in (torch.float64, torch.complex128):
        single = torch.float32 if A.dtype == torch.float64 else torch.complex64
        if torch.equal(A.to(single).to(A.dtype), A):
            return torch.finfo(torch.float32).eps
    return max(call.unit, torch.finfo(torch.float32).eps if A.dtype in (torch.float16, torch.bfloat16) else 0.0)


def _cholesky_values(A: Tensor, L: Tensor, options: dict[str, Any]) -> Tensor:
    """Return estimates of the largest and the smallest eigenvalue: a norm, and two steps of inverse iteration."""
    largest = torch.linalg.matrix_norm(A, 2 if A.shape[-1] < 3 else float("inf"))
    # Along no eigenvector of a simple matrix, as ones would be of [[2, 1], [1, 2]].
    x = torch.arange(1.0, A.shape[-1] + 1).cos().to(A).unsqueeze(-1).expand_as(A[..., :1])
    for _ in range(3):
        x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        x = torch.cholesky_solve(x, L, upper=options.get("upper", False))
    smallest = torch.linalg.vector_norm(x, dim=(-2, -1)).reciprocal()
    return _wide(torch.stack([smallest, torch.maximum(largest, smallest)], -1), 1)


def measure_failure(call: Call, A: Tensor) -> None:
    """Find out why a decomposition raised; time no longer matters here."""
    call.finite_input = _is_finite(A)
    if call.finite_input and call.shape[-1] == call.shape[-2]:
        wide = covariance(_wide(A, 2)) if call.of_samples else _wide(A, 2)
        if call.kind == "cholesky":  # which reads one triangle
            call.values = torch.linalg.eigvalsh(wide, "U" if call.options.get("upper") else "L")
        else:
            call.values = torch.linalg.eigvalsh((wide + wide.mH) / 2)
        call.spread = spread(call.values, call.size, _matrix_unit(A, call))


def measure_gradient(
    call: Call, vectors: dict[str, Tensor], backs: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]
) -> None:
    """Measure one backward pass: the incoming gradients of the outputs, and the gradient that came back."""
    if not backs or backs[0] is None or call.spread is None or call.values is None:
        return
    back = _wide(backs[0], 2)
    arriving = [None if X is None else _wide(X, 1 if X.ndim < len(call.shape) else 2) for X in incoming]
    units = (call.unit, _incoming_unit(call, incoming))
    if call.kind in ("eigh", "eigvalsh"):
        U, to_U = (_wide(vectors["U"], 2), arriving[1]) if "U" in vectors else (None, None)
        gradient = eigen_gradient(call.values, U, arriving[0], to_U, back, call.spread, units)
    elif call.kind in ("svd", "svdvals"):
        k = call.values.shape[-1]
        both: tuple[Tensor, Tensor] | None = None
        arrive: tuple[Tensor | None, Tensor | None] = (None, None)
        if "U" in vectors:
            both = (_wide(vectors["U"], 2)[..., :k], _wide(vectors["Vh"], 2)[..., :k, :].mH)
            arrive = (
                None if arriving[0] is None else arriving[0][..., :k],
                None if arriving[2] is None else arriving[2][..., :k, :].mH,
            )
        gradient = singular_gradient(call.values, both, arriving[1], arrive, back, call.spread, units)
    else:  # no eigenvectors in between: what comes back is the gradient
        finite = torch.isfinite(back).flatten(1).all(-1)
        finite_in, used = torch.ones_like(finite), torch.zeros_like(finite)
        for X in arriving:
            if X is not None:
                finite_in &= torch.isfinite(X).flatten(1).all(-1)
                used |= (X != 0).flatten(1).any(-1)
        one = torch.ones(len(back), dtype=torch.float64)
        yes = torch.ones_like(finite)
        lost = torch.where(finite, one, torch.inf)
        gradient = Gradient(finite_in, finite, lost, 0 * one, yes, used, call.spread.tied, 0)
    call.gradients.append(gradient)


def _incoming_unit(call: Call, incoming: tuple[Tensor | None, ...]) -> float:
    """Return the precision of the incoming gradients, which autocast or a cast behind the call may have lowered."""
    unit = max(call.unit, call.unit_behind)
    for X in incoming:
        if X is None or X.dtype != torch.float64 or not torch.isfinite(X).all():
            continue
        is_single, is_half = (torch.equal(X.to(dtype).to(X.dtype), X) for dtype in (torch.float32, torch.bfloat16))
        if is_single and not is_half:
            unit = max(unit, torch.finfo(torch.float32).eps)
    return unit
