"""Kinds of damage to a decomposition, by construction: what is done, to which part, and where; and what is no damage.

The parts are vectors in columns, values, and for singular values the other vectors, in columns as well. A kind is a
function of the parts of one matrix and of those of its neighbour in the batch.
"""

import math

import torch

SMALL = 1e-6
"""Far above the rounding of float64; in float32 such a change is allowed."""
FINE = ("a little", "float16")
"""In the names of kinds that only double precision can tell from rounding."""
NAN, INF = math.nan, math.inf


def _noise_like(t):
    real, imaginary = torch.randn(2, *t.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return (torch.complex(real, imaginary) if t.is_complex() else real).to(t)


def _rounded(t):
    if t.is_complex():
        return torch.view_as_complex(torch.view_as_real(t).half().to(t.real.dtype))
    return t.half().to(t.dtype)


DAMAGES = {
    "zeroed": lambda t: 0 * t,
    "doubled": lambda t: 2 * t,
    "halved": lambda t: t / 2,
    "scaled a little": lambda t: (1 + SMALL) * t,
    "shifted": lambda t: t + 1,
    "shifted a little": lambda t: t + SMALL,
    "noisy": lambda t: t + _noise_like(t),
    "noisy, a little": lambda t: t + SMALL * _noise_like(t),
    "negated": lambda t: -t,
    "tiny": lambda t: torch.full_like(t, torch.finfo(t.dtype).tiny / 4),
    "huge": lambda t: torch.full_like(t, torch.finfo(t.dtype).max / 4),
    "NaN": lambda t: torch.full_like(t, NAN),
    "infinite": lambda t: torch.full_like(t, INF),
    "minus infinite": lambda t: torch.full_like(t, -INF),
    "rounded to float16": _rounded,
}
IN_VECTORS = {
    "an entry": (1, 2),
    "the first column": (slice(None), 0),
    "the last column": (slice(None), -1),
    "a row": (1, slice(None)),
    "a block": (slice(0, 2), slice(1, 3)),
    "all": (slice(None), slice(None)),
}
IN_VALUES = {"the first": 0, "a middle one": 1, "the last": -1, "all": slice(None)}


def _at(part, place, damage):
    """Do it to one part, at one place."""

    def change(parts, _):
        parts = [each.clone() for each in parts]
        parts[part][place] = damage(parts[part][place])
        return parts

    return change


def _order(*columns):
    def turned(t):
        return t[..., [*columns, *range(len(columns), t.shape[-1])]]

    return turned


def _rotation(i, j, angle):
    def turned(U):
        W = U.clone()
        W[:, i] = math.cos(angle) * U[:, i] + math.sin(angle) * U[:, j]
        W[:, j] = math.cos(angle) * U[:, j] - math.sin(angle) * U[:, i]
        return W

    return turned


def _with_column(i, source):
    def changed(U):
        W = U.clone()
        W[:, i] = source(U)
        return W

    return changed


def _row_order(*rows):
    return lambda U: U[[*rows, *range(len(rows), U.shape[-2])]]


OF_VECTORS = {
    "the first column is the last": _with_column(0, lambda U: U[:, -1]),
    "the last column is the first": _with_column(-1, lambda U: U[:, 0]),
    "the last column is the one before it": _with_column(-1, lambda U: U[:, -2]),
    "the first column is garbage": _with_column(0, lambda U: _noise_like(U[:, 0])),
    "two columns added up": _with_column(0, lambda U: U[:, 0] + U[:, 1]),
    "neighbours swapped": _order(1, 0),
    "three columns in a cycle": _order(1, 2, 0),
    "columns reversed": lambda U: U.flip(-1),
    "columns rolled": lambda U: U.roll(1, -1),
    "two rows swapped": _row_order(1, 0),
    "rows rolled": lambda U: U.roll(1, -2),
    "transposed": lambda U: U.mT.reshape(U.shape),
    "neighbours turned by 1": _rotation(0, 1, 1.0),
    "neighbours turned a little": _rotation(0, 1, SMALL),
    "the first and the last turned by 1": _rotation(0, -1, 1.0),
    "the first and the last turned a little": _rotation(0, -1, SMALL),
    "sheared a little": _with_column(0, lambda U: U[:, 0] + SMALL * U[:, -1]),
    "half of the columns zeroed": lambda U: torch.where(torch.arange(U.shape[-1]) < U.shape[-1] // 2, U, 0.0),
    "the identity": lambda U: torch.eye(*U.shape, dtype=U.dtype),
    "ones": torch.ones_like,
}
OF_VALUES = {
    "squared": lambda l: l * l,
    "their roots": lambda l: l.abs().sqrt(),
    "inverted": lambda l: 1 / l,
    "rolled": lambda l: l.roll(1),
    "reversed": lambda l: l.flip(-1),
    "two swapped": _order(1, 0),
    "the first is the last": lambda l: torch.cat([l[-1:], l[1:]]),
    "their mean": lambda l: l.mean().expand_as(l),
}
OF_EVERYTHING = {
    "everything NaN": lambda parts, _: [NAN * part for part in parts],
    "everything zero": lambda parts, _: [0 * part for part in parts],
    "everything the neighbour's": lambda parts, neighbour: neighbour,
    "unsorted, with their vectors": lambda parts, _: [part.flip(-1) for part in parts],
    "two unsorted, with their vectors": lambda parts, _: [_order(1, 0)(part) for part in parts],
}


def _of(*changes):
    """Change the parts of these numbers as a whole."""
    by_part = dict(changes)
    return lambda parts, _: [by_part.get(i, torch.clone)(part) for i, part in enumerate(parts)]


def _neighbour_s(part):
    return lambda parts, neighbour: [neighbour[i] if i == part else each for i, each in enumerate(parts)]


def kinds(vectors, values):
    """Return the kinds of damage by name: ``vectors`` has the number of each part with vectors, by its name."""
    made = dict(OF_EVERYTHING)
    for name, part in vectors.items():
        for what, damage in DAMAGES.items():
            made |= {f"{name}: {where} {what}": _at(part, place, damage) for where, place in IN_VECTORS.items()}
        made |= {f"{name}: {what}": _of((part, damage)) for what, damage in OF_VECTORS.items()}
        made[f"{name}: the neighbour's"] = _neighbour_s(part)
    for what, damage in DAMAGES.items():
        made |= {f"values: {where} {what}": _at(values, place, damage) for where, place in IN_VALUES.items()}
    made |= {f"values: {what}": _of((values, damage)) for what, damage in OF_VALUES.items()}
    made["values: the neighbour's"] = _neighbour_s(values)
    return made


def _negated(*place):
    """Return a function that negates what is at a place."""
    return lambda t: _at(0, place, torch.neg)([t], None)[0]


def _nudged(t):
    """Rounding, as another solver might have it."""
    return t * (1 + 4 * torch.finfo(t.dtype).eps * torch.sgn(_noise_like(t)))


OF_EIGENVALUES = {
    name: kind
    for name, kind in kinds({"vectors": 1}, 0).items()
    if name not in {f"vectors: {where} negated" for where in ("the first column", "the last column", "all")}
} | {"vectors doubled, with values to match": _of((0, lambda l: l / 4), (1, lambda U: 2 * U))}
OF_SINGULAR_VALUES = kinds({"left": 0, "right": 2}, 1) | {
    "left doubled, with values to match": _of((0, lambda U: 2 * U), (1, lambda s: s / 2)),
    "left doubled, with right to match": _of((0, lambda U: 2 * U), (2, lambda V: V / 2)),
    "the last value and its vector negated": _of((0, _negated(..., -1)), (1, _negated(-1))),
}
# The first two values are a tie.
HARMLESS_TO_EIGENVALUES = {
    "a column negated": _of((1, _negated(..., 2))),
    "all negated": _of((1, torch.neg)),
    "a tie turned": _of((1, _rotation(0, 1, 1.0))),
    "a tie in another order": _of((1, _order(1, 0))),
    "rounding of the vectors": _of((1, _nudged)),
    "rounding of the values": _of((0, lambda l: _nudged(l).sort().values)),
}
HARMLESS_TO_SINGULAR_VALUES = {
    "pairs negated": _of((0, _negated(..., [0, 2])), (2, _negated(..., [0, 2]))),
    "a tie turned": _of((0, _rotation(0, 1, 1.0)), (2, _rotation(0, 1, 1.0))),
    "rounding of the vectors": _of((0, _nudged), (2, _nudged)),
    "rounding of the values": _of((1, lambda s: _nudged(s).sort(descending=True).values)),
}
