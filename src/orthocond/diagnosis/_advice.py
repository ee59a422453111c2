"""The sentences: why a verdict was given, and what to write instead."""

from orthocond.diagnosis._calls import Call
from orthocond.diagnosis._measure import Gradient

__all__ = ["explain"]


def explain(call: Call, verdict: str, gradient: Gradient | None, index: int) -> tuple[str, str]:
    """Return the reason of a verdict and the advice, whose indented lines are code to paste."""
    if not call.finite_input:
        return _non_finite_input(call)
    if verdict == "non-finite input":
        return (
            "The gradient that arrives at this call already contains NaN or infinity. The matrix itself is fine.",
            "The cause comes after this call: in the loss, or in what is done with the result. This setting names the "
            "operation:\n"
            "    torch.autograd.set_detect_anomaly(True)",
        )
    if verdict == "healthy":
        return _healthy(call, gradient), ""
    if _is_indefinite(call, index) and verdict == "singular":
        return _negative(call, index)
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
        "The matrix already contains NaN or infinity when it is decomposed. The cause comes before this call.",
        "Find the first layer with a non-finite output. If the matrix is a covariance computed in float16, it "
        "overflows above 65504. Compute it in float32, outside autocast:\n"
        f"    with torch.autocast({call.device.type!r}, enabled=False):\n"
        "        covariance = orthocond.linalg.covariance(features.float())",
    )


def _ties(call: Call, gradient: Gradient | None, index: int) -> tuple[str, str]:
    values, vectors = _values(call), _vectors(call)
    if call.kind == "ours":
        return (
            "Two eigenvalues are equal up to rounding, where the chosen gradient rule is not finite.",
            f'Use the exact rule:\n    gradient="exact"  # an option of {call.function}, and its default',
        )
    reason = f"Two {values} are equal up to rounding, and the gradient through {vectors} divides by their difference."
    if gradient is None:
        reason += " No backward pass was seen."
    else:
        reason += (
            f"{_came_back(gradient, index)} The loss itself is well posed: it is the same for every valid choice of "
            f"{vectors}, so its true gradient is finite."
        )
    return reason, (
        "Replace the decomposition, and the lines that use its result, by one function whose gradient is exact here:\n"
        + _replacement(call, gradient, index)
    )


def _singular(call: Call, gradient: Gradient | None, index: int) -> tuple[str, str]:
    s, values = call.spread, _values(call)
    assert s is not None
    n = s.null.shape[-1]
    num_zero = n - int(s.rank[index])
    reason = f"{num_zero} of {n} {values} {'is' if num_zero == 1 else 'are'} zero up to rounding"
    if bool(s.negative[index]):
        reason += " (and may be slightly negative)"
    if gradient is None or not bool(gradient.finite[index]):
        divisors = "it" if num_zero == 1 else "them, or by the differences between them"
        reason += f". The gradient divides by {divisors}.{_came_back(gradient, index)}"
    else:
        reason += (
            f": the solver returns rounding noise for {'it' if num_zero == 1 else 'them'}. The loss takes a root, a "
            f"logarithm or an inverse of that noise, or uses its {_vectors(call)}. So the gradient is finite, "
            "but mostly noise."
        )
    return reason, (
        f"Drop the zero {values}, in the result and in the gradient:\n"
        + _replacement(call, gradient, index, rtol=True)
        + "\nIf the matrix is a covariance, you can avoid the cause: use more samples than channels, and leave out "
        "channels that are constant."
    )


def _is_indefinite(call: Call, index: int) -> bool:
    """Return whether an eigenvalue is negative by more than rounding."""
    s, values = call.spread, call.values
    if s is None or values is None or not bool(s.negative[index]):
        return False
    return bool((values[index][~s.null[index]] < 0).any())


def _negative(call: Call, index: int) -> tuple[str, str]:
    assert call.values is not None
    return (
        f"The matrix has a negative eigenvalue ({float(call.values[index].min()):.2g}), which is more than rounding. "
        "So the matrix is not a covariance, and has no real square root, logarithm or Cholesky factor.",
        "Check how the matrix is formed. A covariance computed as E[x x^T] - E[x] E[x]^T loses its digits where the "
        "mean is large. Subtract the mean first, in float64 if need be:\n"
        "    covariance = orthocond.linalg.covariance(features)",
    )


def _ill_conditioned(call: Call, gradient: Gradient | None, index: int) -> tuple[str, str]:
    if call.kind == "ours":
        return (
            f"The matrix is singular, and eps={call.options.get('eps', 0.0):g} keeps its zero eigenvalues: rounding "
            "noise is divided by sqrt(eps). The gradient is exact, but of a function that amplifies noise, and "
            "the noise of each batch is different.",
            f"Drop the zero eigenvalues:\n    eps=0.0, rtol={_rtol(call)}  # options of {call.function}",
        )
    s, values = call.spread, _values(call)
    assert s is not None
    dtype = str(call.dtype).removeprefix("torch.")
    reason = (
        f"The condition number is {float(s.cond[index]):.1e}. In {dtype} the smallest {values} have few correct digits "
        f"or none, and the gradient is dominated by them.{_came_back(gradient, index)}"
    )
    if call.kind == "pinv":
        return reason, (
            "Treat the smallest singular values as zero:\n"
            f"    torch.linalg.pinv({call.place.argument}, rtol={_rtol(call)})"
        )
    advice = f"Treat the smallest {values} as zero:\n" + _replacement(call, gradient, index, rtol=True)
    if dtype != "float64":
        advice += "\nOr use float64 from the start: convert what the matrix is computed from, not the finished matrix."
    return reason, advice


def _ill_posed(call: Call, gradient: Gradient | None, _: int) -> tuple[str, str]:
    values, vectors, is_svd = _values(call), _vectors(call), call.kind in ("svd", "svdvals")
    if gradient is not None and gradient.num_used == 0:
        largest = "torch.linalg.svdvals({})[..., :k]" if is_svd else "torch.linalg.eigvalsh({})[..., -k:]"
        return (
            f"Two {values} are equal up to rounding, and the loss treats them differently. A single one of them has no "
            "derivative there.",
            "Use a function that treats equal ones alike, for example the sum of the k largest:\n"
            f"    {largest.format(call.place.argument)}.sum(-1)",
        )
    first = ":k" if is_svd else "-k:"
    return (
        f"Two {values} are equal up to rounding, and the loss depends on which {vectors} of their common space the "
        "solver returns. Any rotation of them is as valid. So the loss is not a function of the matrix, and no formula "
        "for the gradient can be right.",
        f"Change the loss so that it uses the space and not its basis. For example, use the projector on the {vectors} "
        "of the k largest values, which must differ from the other values:\n"
        f"    P = orthocond.linalg.spectral_projector({_gram(call)}, k)  # in place of U[:, {first}]",
    )


def _cholesky(call: Call, index: int) -> tuple[str, str]:
    A, B, n = call.place.argument, _operand(call), call.shape[-1]
    lowest = "" if call.values is None else f" (smallest eigenvalue {float(call.values[index].min()):.1e})"
    reason = (
        f"The matrix is singular up to rounding{lowest}, so it has no Cholesky factor."
        if call.failure
        else f"The matrix is nearly singular{lowest}: its Cholesky factor and the gradient have few correct digits."
    )
    return reason, (
        "Use the symmetric square root. It exists for singular matrices too, and Q @ Q.mT is the matrix:\n"
        f"    Q = orthocond.linalg.matrix_sqrth({A})\n"
        "Or add to the diagonal, relative to its size:\n"
        f"    torch.linalg.cholesky({A} + 1e-5 * {B}.diagonal(dim1=-2, dim2=-1).mean() * torch.eye({n}).to({A}))"
    )


def _came_back(gradient: Gradient | None, index: int) -> str:
    if gradient is None:
        return ""
    if not bool(gradient.finite[index]):
        return " The backward pass returned NaN or infinity."
    amplification, noise = float(gradient.amplification[index]), float(gradient.noise[index])
    if amplification > 100:
        return f" The gradient that came back is {amplification:.1e} times as large as without that division."
    return f" The error of the gradient that came back may be {min(noise, 1.0):.0%}." if noise > 1e-2 else ""


def _values(call: Call) -> str:
    return "singular values" if call.kind in ("svd", "svdvals", "pinv") else "eigenvalues"


def _vectors(call: Call) -> str:
    return "singular vectors" if call.kind == "svd" else "eigenvectors"


def _rtol(call: Call) -> str:
    return "1e-4" if call.unit > 1e-10 else "1e-8"


def _operand(call: Call) -> str:
    """Return what is decomposed, in the words of its source line, in parentheses where it is an expression."""
    A = call.place.argument
    return A if A.replace(".", "").replace("_", "").isalnum() else f"({A})"


def _gram(call: Call, *, both_sides: bool = False) -> str:
    """Return the symmetric matrix whose eigenvectors are the vectors of a call, in the words of its source line."""
    A = call.place.argument
    if call.kind != "svd" or (call.symmetric and not both_sides):
        return A
    return f"{_operand(call)} @ {_operand(call)}.mT"


def _replacement(call: Call, gradient: Gradient | None, index: int, *, rtol: bool = False) -> str:
    """Return the line of code that replaces a decomposition and what was made of it."""
    A = call.place.argument
    option = f", rtol={_rtol(call)}" if rtol else ""
    both_sides = gradient is not None and gradient.both_sides
    if gradient is not None and both_sides and not gradient.values_used:
        return (
            f"    orthocond.linalg.nearest_orthogonal({A}{option})  # U Vh\n"
            f"    orthocond.linalg.nearest_rotation({A})  # or this, with determinant 1"
        )
    if call.kind == "svd" and (both_sides or not call.symmetric):
        k = int(call.spread.rank[index]) if rtol and call.spread is not None else "k"
        projector = f"orthocond.linalg.spectral_projector({_gram(call, both_sides=both_sides)}, {k})"
        return f"    {projector} @ {_operand(call)}  # the best approximation of rank {k}"
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
