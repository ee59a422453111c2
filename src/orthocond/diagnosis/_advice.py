"""The sentences: why a verdict was given, and what to write instead."""

from orthocond.diagnosis._calls import Call
from orthocond.diagnosis._measure import Gradient

__all__ = ["explain"]

_VALUES = {"svd": "singular values", "svdvals": "singular values", "pinv": "singular values"}


def explain(call: Call, verdict: str, gradient: Gradient | None, index: int) -> tuple[str, str]:
    """Return the reason of a verdict and the advice, whose indented lines are code to paste."""
    if not call.finite_input:
        return _non_finite_input(call)
    if verdict == "non-finite input":
        return (
            "The gradient that arrives at this call already holds NaN or infinity. The matrix itself is fine.",
            "Look behind this call: at the loss, and at what is done with the result. This names the operation:\n"
            "    torch.autograd.set_detect_anomaly(True)",
        )
    if verdict == "healthy":
        return _healthy(call, gradient), ""
    if call.kind == "cholesky":
        return _cholesky(call, index)
    return {
        "ill-posed": _ill_posed,
        "singular": _singular,
        "ties": _ties,
        "ill-conditioned": _ill_conditioned,
    }[verdict](call, gradient, index)


def _healthy(call: Call, gradient: Gradient | None) -> str:
    if gradient is not None:
        return "The gradient is finite and accurate."
    if call.requires_grad:
        return "No backward pass was seen. Call backward() inside the with block to have the gradient checked."
    return "No gradient is asked for here."


def _non_finite_input(call: Call) -> tuple[str, str]:
    return (
        "The matrix already holds NaN or infinity when it is decomposed. The cause is in front of this call.",
        "Find the first layer with a non-finite output. If the matrix is a covariance in float16, it overflows above\n"
        "65504; compute it in float32 outside autocast:\n"
        f"    with torch.autocast({call.device.type!r}, enabled=False):\n"
        "        covariance = orthocond.linalg.covariance(features.float())",
    )


def _ties(call: Call, gradient: Gradient | None, index: int) -> tuple[str, str]:
    values = _VALUES.get(call.kind, "eigenvalues")
    if call.kind == "ours":
        return (
            "Two eigenvalues are equal up to rounding, where the chosen gradient rule is not finite.",
            f'Use the exact rule:\n    gradient="exact"  # an option of {call.function}, and its default',
        )
    came = _came_back(gradient, index)
    reason = (
        f"Two {values} are equal up to rounding, and the gradient through {_vectors(call)} divides by their "
        f"difference.{came} The loss itself is well posed: it doesn't depend on the choice of {_vectors(call)}, so the "
        "true gradient is finite."
    )
    if gradient is None:
        reason = (
            f"Two {values} are equal up to rounding, and the gradient through {_vectors(call)} divides by their "
            "difference. No backward pass was seen."
        )
    return reason, "A function with a gradient of its own needs no such difference. Write\n" + _replacement(
        call, gradient
    )


def _singular(call: Call, gradient: Gradient | None, index: int) -> tuple[str, str]:
    s = call.spread
    n = s.null.shape[-1] if s is not None else call.shape[-1]
    if s is not None and call.values is not None and s.negative[index] and s.rank[index] == n:
        lowest = float(call.values[index].min())
        return (
            f"The matrix has a negative eigenvalue ({lowest:.2g}), which is more than rounding: a square root, a "
            "logarithm or an inverse square root of it is NaN.",
            "Form the matrix so that it can't have one, in float64 if need be, as X X^T of centred features:\n"
            "    covariance = orthocond.linalg.covariance(features)",
        )
    rank = int(s.rank[index]) if s is not None else 0
    reason = f"{n - rank} of {n} {_VALUES.get(call.kind, 'eigenvalues')} are zero up to rounding"
    reason += ", some of them slightly negative" if s is not None and bool(s.negative[index]) else ""
    if gradient is None or not bool(gradient.finite[index]):
        reason += f". A root, a logarithm or an inverse has no finite gradient there, nor have {_vectors(call)} that "
        reason += "belong to one value." + _came_back(gradient, index)
    else:
        reason += (
            ": nothing but noise, and the loss takes a root, a logarithm or an inverse of it. The gradient is finite "
        )
        reason += "but dominated by that noise."
    advice = (
        "Drop the null space, in the result and in the gradient:\n"
        + _replacement(call, gradient, rtol=True)
        + "\nOr keep the matrix from being singular: more samples than channels, no constant channels."
    )
    return reason, advice


def _ill_conditioned(call: Call, gradient: Gradient | None, index: int) -> tuple[str, str]:
    s = call.spread
    cond = f"{float(s.cond[index]):.1e}" if s is not None else "too large"
    values = _VALUES.get(call.kind, "eigenvalues")
    dtype = str(call.dtype).removeprefix("torch.")
    reason = (
        f"The condition number is {cond}. In {dtype} the smallest {values} have few correct digits or none, and the "
        f"gradient is dominated by them.{_came_back(gradient, index)}"
    )
    if call.kind == "pinv":
        return reason, (
            "Drop the singular values that are rounding noise:\n"
            f"    torch.linalg.pinv({call.place.argument}, rtol={_rtol(call)})"
        )
    wide = "" if dtype == "float64" else "Form the matrix in float64 from its factors and decompose it there. Or drop "
    return reason, (wide or "Drop ") + "what is noise:\n" + _replacement(call, gradient, rtol=True)


def _ill_posed(call: Call, gradient: Gradient | None, _: int) -> tuple[str, str]:
    values = _VALUES.get(call.kind, "eigenvalues")
    if gradient is not None and gradient.num_used == 0:
        return (
            f"Two {values} are equal up to rounding, and the loss treats them differently. A single one of them has no "
            "derivative there.",
            "Use a function that treats equal ones alike, for example the sum of the k largest:\n"
            f"    torch.linalg.eigvalsh({call.place.argument})[..., -k:].sum(-1)",
        )
    return (
        f"Two {values} are equal up to rounding, and the loss depends on which {_vectors(call)} of their common space "
        "the solver returns. Any rotation of them is as valid, so the loss is not a function of the matrix, and no "
        "formula for the gradient can be right.",
        f"Change the loss so that it uses the space and not its basis: the projector on {_vectors(call)} with a gap "
        f"to the others, or a function of the whole matrix:\n"
        f"    P = orthocond.linalg.spectral_projector({_symmetric_argument(call)}, k)  # instead of U[:, -k:]",
    )


def _cholesky(call: Call, index: int) -> tuple[str, str]:
    A = call.place.argument
    lowest = "" if call.values is None else f" (smallest eigenvalue {float(call.values[index].min()):.1e})"
    reason = (
        f"The matrix is not positive definite up to rounding{lowest}, so it has no Cholesky factor."
        if call.failure
        else f"The matrix is nearly singular{lowest}: its Cholesky factor and the gradient have few correct digits."
    )
    return reason, (
        "The symmetric square root exists for singular matrices too, and is a factor as well (Q Q^T = A):\n"
        f"    Q = orthocond.linalg.matrix_sqrth({A})\n"
        "Or add to the diagonal, relative to its size:\n"
        f"    torch.linalg.cholesky({A} + 1e-5 * {A}.diagonal(dim1=-2, dim2=-1).mean() * torch.eye({call.shape[-1]}))"
    )


def _came_back(gradient: Gradient | None, index: int) -> str:
    if gradient is None:
        return ""
    if not bool(gradient.finite[index]):
        return " NaN or infinity came back."
    amplification, noise = float(gradient.amplification[index]), float(gradient.noise[index])
    if amplification > 100:
        return f" The gradient that came back is {amplification:.1e} times its well-posed part."
    return f" The gradient that came back has a relative error of about {noise:.0e}." if noise > 1e-3 else ""


def _vectors(call: Call) -> str:
    return "singular vectors" if call.kind == "svd" else "eigenvectors"


def _rtol(call: Call) -> str:
    return "1e-4" if call.unit > 1e-10 else "1e-8"


def _symmetric_argument(call: Call) -> str:
    A = call.place.argument
    if call.kind != "svd" or call.symmetric:
        return A
    return f"{A} @ {A}.mT" if A.replace(".", "").replace("_", "").isalnum() else f"({A}) @ ({A}).mT"


def _replacement(call: Call, gradient: Gradient | None, *, rtol: bool = False) -> str:
    """Return the line of code that replaces a decomposition and what was made of it."""
    A = call.place.argument
    option = f", rtol={_rtol(call)}" if rtol else ""
    if gradient is not None and gradient.both_sides and not gradient.values_used:
        return (
            f"    orthocond.linalg.nearest_orthogonal({A}{option})  # U Vh\n"
            f"    orthocond.linalg.nearest_rotation({A})  # U Vh with determinant 1"
        )
    if call.kind == "svd" and (not call.symmetric or (gradient is not None and gradient.both_sides)):
        return f"    orthocond.linalg.spectral_projector({_symmetric_argument(call)}, k) @ {A}  # the best rank-k part"
    powers = {function for function in call.use.functions if isinstance(function, float)}
    if powers == {0.5, -0.5}:
        return f"    Q, S = orthocond.linalg.matrix_sqrth_pair({A}{option})"
    if len(call.use.functions) == 1 or len(powers) == 1:
        (function,) = powers or call.use.functions
        if function == 0.5:
            return f"    orthocond.linalg.matrix_sqrth({A}{option})"
        if function == -0.5:
            return f"    orthocond.linalg.matrix_inv_sqrth({A}{option})"
        if isinstance(function, str):
            return f"    orthocond.linalg.matrix_{function}h({A}{option if function == 'log' else ''})"
        return f"    orthocond.linalg.matrix_powerh({A}, {function:g}{option})"
    if gradient is not None and not gradient.values_used and 0 < gradient.num_used < call.shape[-1]:
        return f"    orthocond.linalg.spectral_projector({A}, {gradient.num_used})"
    return (
        f"    orthocond.linalg.matrix_inv_sqrth({A}{option})\n"
        "    # or matrix_sqrth, matrix_logh, matrix_powerh; matrix_functionh for any other function of the eigenvalues"
    )
