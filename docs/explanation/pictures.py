"""Make the pictures of the explanation: ``python docs/explanation/pictures.py``, or ``make pictures``.

Each picture is a function that computes, draws into a file, and returns the numbers that it has drawn, so that a test
can check what the picture says. All random numbers are seeded.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from orthocond.linalg import (
    GRADIENTS,
    covariance,
    matrix_inv_sqrth,
    matrix_sqrth,
    nearest_orthogonal,
    spectrum,
)
from orthocond.nn import (
    DecorrelatedBatchNorm2d,
    orthogonal_loss,
    orthogonal_weight,
    whiten_color,
)
from orthocond.optim import nearest_orthogonal_gradient, optimal_learning_rate

__all__ = ["PICTURES", "main"]

Facts = dict[str, Tensor]

# Okabe and Ito's colours, which the colour-blind can tell apart; each line has a marker or a dash of its own as well.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PINK = (
    "#000000",
    "#e69f00",
    "#56b4e9",
    "#009e73",
    "#0072b2",
    "#d55e00",
    "#cc79a7",
)
GREY = "#8a8f98"
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.facecolor": "white",
    "font.size": 9.5,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.7,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
}


@contextmanager
def drawing(path: Path, *titles: str, height: float = 3.3) -> Iterator[list[Axes]]:
    """Give one axis for each title, side by side, and save them at the end."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(titles), figsize=(8, height), dpi=150, squeeze=False, layout="constrained")
        for axis, title in zip(axes[0], titles, strict=True):
            axis.set_title(title, loc="left")
        yield list(axes[0])
        figure.savefig(path, metadata={"Software": ""})
        plt.close(figure)


def images(num: int, size: int, generator: torch.Generator) -> Tensor:
    """Return random colour images ``(num, 3, size, size)`` with the 1/f amplitudes that photographs have."""
    frequency = torch.fft.fftfreq(size, dtype=torch.float64)
    radius = torch.hypot(frequency[:, None], frequency[None, :]).clamp(min=1 / size)
    noise = torch.randn(num, 3, size, size, generator=generator, dtype=torch.float64)
    planes = torch.fft.ifft2(torch.fft.fft2(noise) / radius).real
    colours = torch.tensor([[1.0, 0.3, 0.1], [1.0, 0.0, -0.2], [1.0, -0.3, 0.1]], dtype=torch.float64)
    mixed = torch.einsum("cd,ndhw->nchw", colours, planes)
    return (mixed / mixed.std()).float()


def stem(channels: int, generator: torch.Generator) -> nn.Conv2d:
    """Return a 3x3 convolution from 3 to so many channels, with the usual spread of its entries."""
    conv = nn.Conv2d(3, channels, 3, bias=False)
    with torch.no_grad():
        conv.weight.copy_((2 * torch.rand(conv.weight.shape, generator=generator) - 1) / 27**0.5)
    return conv


def features(weight: Tensor, pixels: Tensor) -> Tensor:
    """Return the outputs of a convolution as samples ``(channels, N)``."""
    return nn.functional.conv2d(pixels, weight).movedim(1, 0).flatten(1)


def random_orthogonal(n: int, generator: torch.Generator) -> Tensor:
    """Return a rotation or reflection ``(n, n)``, each as probable as any other."""
    Q, R = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    rotation: Tensor = Q * R.diagonal().sign()
    return rotation


def cloud(path: Path, *, num: int = 400) -> Facts:
    """Draw samples in a plane, whitened by the inverse root, and coloured by another root."""
    generator = torch.Generator().manual_seed(0)
    axes = torch.tensor([[2.2, 0.0], [1.5, 0.5]], dtype=torch.float64)
    content = axes @ torch.randn(2, num, generator=generator, dtype=torch.float64) + 1.0
    style = torch.tensor([[0.6, 0.0], [-1.2, 0.7]], dtype=torch.float64) @ torch.randn(
        2, num, generator=generator, dtype=torch.float64
    )
    centred = content - content.mean(-1, keepdim=True)
    whitened = matrix_inv_sqrth(covariance(content)) @ centred
    coloured = whiten_color(content[None, :, :, None], style[None, :, :, None])[0, :, :, 0]
    titles = ("centred samples, covariance P", "whitened: P to the power -1/2", "coloured: by another root")
    circle = torch.linspace(0, 2 * math.pi, 200, dtype=torch.float64)
    ring = torch.stack([circle.cos(), circle.sin()])
    with drawing(path, *titles, height=2.9) as panels:
        for axis, samples, colour in zip(panels, (centred, whitened, coloured), (BLUE, GREEN, RED), strict=True):
            axis.plot(*samples.numpy(), ".", color=colour, markersize=2.5, alpha=0.5)
            axis.plot(*(2 * matrix_sqrth(covariance(samples)) @ ring).numpy(), color=BLACK, linewidth=1.2)
            axis.set(xlim=(-6.5, 6.5), ylim=(-6.5, 6.5), aspect="equal", xticks=(-5, 0, 5), yticks=(-5, 0, 5))
    return {"whitened": covariance(whitened), "coloured": covariance(coloured), "style": covariance(style)}


def condition(path: Path, *, num_batches: int = 24, num_images: int = 16) -> Facts:
    """Draw the spectrum of a stem's covariance, and three condition numbers of it over batches."""
    generator = torch.Generator().manual_seed(0)
    weight = stem(64, generator).weight.detach()
    found: dict[str, list[Tensor]] = {"raw, float32": [], "raw, float64": [], "on the support": [], "eps = 0.01": []}
    spectra: dict[torch.dtype, Tensor] = {}
    ranks = []
    for _ in range(num_batches):
        pixels = images(num_images, 32, generator)
        for dtype in (torch.float32, torch.float64):
            told = spectrum(covariance(features(weight.to(dtype), pixels.to(dtype))), eps=1e-2)
            spectra[dtype] = told.eigenvalues / told.eigenvalues[0]
            found["raw, float32" if dtype == torch.float32 else "raw, float64"].append(told.cond)
        found["on the support"].append(told.cond_support)
        found["eps = 0.01"].append(told.cond_eps)
        ranks.append(told.rank)
    with drawing(path, "one covariance, two precisions", "its condition numbers, batch by batch") as (left, right):
        for dtype, colour, marker in ((torch.float32, ORANGE, "o"), (torch.float64, BLUE, "s")):
            name = str(dtype).removeprefix("torch.")
            left.semilogy(spectra[dtype].abs().numpy(), marker, color=colour, markersize=3.5, label=name)
            left.axhline(64 * torch.finfo(dtype).eps, color=colour, linestyle=":", linewidth=1.2)
            left.annotate("n · finfo.eps", (1, 110 * torch.finfo(dtype).eps), color=colour, fontsize=8.5)
        left.annotate("27 eigenvalues", (13, 3e-2), fontsize=9)
        left.annotate("37 of rounding noise", (36, 4e-5), fontsize=9)
        left.set(xlabel="index of the eigenvalue", ylabel="|eigenvalue| / largest", ylim=(1e-19, 5))
        left.legend(loc="lower left")
        styles = ((ORANGE, "o"), (BLUE, "s"), (GREEN, "^"), (PINK, "v"))
        for (name, values), (colour, marker) in zip(found.items(), styles, strict=True):
            right.semilogy(torch.stack(values).numpy(), marker, color=colour, markersize=3.5, label=name)
        right.set(xlabel="batch", ylim=(1e2, 1e25))
        right.legend(loc="upper left", ncols=2, columnspacing=1.0, handletextpad=0.2)
    return {name: torch.stack(values) for name, values in found.items()} | {"rank": torch.stack(ranks)}


def gradients(path: Path, *, num_gaps: int = 33, num_matrices: int = 64) -> Facts:
    """Draw the error of the root's gradient against the gap between two eigenvalues, for each rule."""
    rules: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"autograd through eigh": _gradient_through_eigh}
    rules |= {name: _gradient_by(name) for name in GRADIENTS}
    facts: Facts = {}
    for dtype, smallest in ((torch.float32, -8), (torch.float64, -16)):
        dtype_name = str(dtype).removeprefix("torch.")
        gaps = torch.logspace(smallest, math.log10(0.5), num_gaps, dtype=torch.float64)
        errors: dict[str, list[Tensor]] = {name: [] for name in rules}
        for gap in gaps:
            generator = torch.Generator().manual_seed(0)
            rotations = torch.stack([random_orthogonal(2, generator) for _ in range(num_matrices)])
            smaller = 1 - gap * (1 - 0.2 * torch.rand(num_matrices, 1, 1, generator=generator, dtype=torch.float64))
            A = (rotations * torch.cat([torch.ones_like(smaller), smaller], -1)) @ rotations.mT
            G = torch.randn(A.shape, generator=generator, dtype=torch.float64)
            A, G = ((M + M.mT).div(2).to(dtype) for M in (A, G))
            truth = _gradient_by_linear_system(A.double(), G.double())
            for name, rule in rules.items():
                wrong = torch.linalg.matrix_norm(rule(A, G).double() - truth) / torch.linalg.matrix_norm(truth)
                errors[name].append(wrong.nan_to_num(torch.inf).max())
        facts |= {f"{name}, {dtype_name}": torch.stack(e) for name, e in errors.items()}
        facts[f"gaps, {dtype_name}"] = gaps
    styles = {
        "autograd through eigh": (BLACK, "-", 1.7),
        "naive": (ORANGE, "-", 3.5),
        "pade": (SKY, "--", 1.7),
        "taylor": (RED, "-.", 1.7),
        "clip": (PINK, (0, (5, 1)), 1.7),
        "exact": (GREEN, "-", 2.4),
    }
    with drawing(path, "float32 matrices", "float64 matrices") as panels:
        for axis, dtype_name in zip(panels, ("float32", "float64"), strict=True):
            gaps = facts[f"gaps, {dtype_name}"]
            for name, (colour, dash, width) in styles.items():
                error = facts[f"{name}, {dtype_name}"]
                axis.loglog(gaps.numpy(), error.numpy(), color=colour, linestyle=dash, linewidth=width, label=name)
                lost = gaps[error.isinf()].numpy()
                axis.plot(lost, [20.0] * len(lost), "x", color=colour, markersize=5)
            axis.set(xlabel="gap between the eigenvalues 1 and 1 - gap", ylim=(1e-17, 100))
        panels[0].annotate("x: not finite", (2e-7, 12), fontsize=8.5)
        panels[0].set_ylabel("relative error of the gradient, worst")
        panels[0].legend(loc="lower left", ncols=2, columnspacing=1.0)
    return facts


def _gradient_by(rule: str) -> Callable[[Tensor, Tensor], Tensor]:
    def gradient(A: Tensor, G: Tensor) -> Tensor:
        A = A.clone().requires_grad_()
        (found,) = torch.autograd.grad((matrix_sqrth(A, gradient=rule) * G).sum(), A)
        return found

    return gradient


def _gradient_through_eigh(A: Tensor, G: Tensor) -> Tensor:
    A = A.clone().requires_grad_()
    l, U = torch.linalg.eigh(A)
    (found,) = torch.autograd.grad((((U * l.sqrt().unsqueeze(-2)) @ U.mT) * G).sum(), A)
    return (found + found.mT) / 2


def _gradient_by_linear_system(A: Tensor, G: Tensor) -> Tensor:
    """Return the ``H`` with ``Q H + H Q = G``, ``Q = A^(1/2)``, as a system of ``n^2`` equations: no eigenvalues."""
    n = A.shape[-1]
    Q, identity = matrix_sqrth(A), torch.eye(n, dtype=A.dtype)
    system = torch.stack([torch.kron(q, identity) + torch.kron(identity, q) for q in Q])
    solved: Tensor = torch.linalg.solve(system, G.reshape(-1, n * n))
    return solved.reshape(G.shape)


def null_space(path: Path, *, num_images: int = 64) -> Facts:
    """Draw what a batch's whitening matrix makes of other batches, in the null space and outside it, against eps."""
    generator = torch.Generator().manual_seed(0)
    weight = stem(64, generator).weight.detach()
    turn = torch.randn(weight.shape, generator=generator)
    turned = weight + 0.01 * turn * weight.norm() / turn.norm()
    first, second = images(num_images, 32, generator), images(num_images, 32, generator)
    mine = features(weight, first)
    other = {
        "next batch, float32": (mine, features(weight, second)),
        "next batch, bfloat16": (mine.bfloat16().float(), features(weight, second).bfloat16().float()),
        "weight turned by 1%": (mine, features(turned, second)),
    }
    basis, _ = torch.linalg.qr(weight.flatten(1).double(), mode="complete")
    support, null = basis[:, :27], basis[:, 27:]
    grid = torch.logspace(-10, 0, 41, dtype=torch.float64)
    facts: Facts = {"eps": grid}

    def energies(P: Tensor, samples: Tensor, *, eps: float = 0.0, rtol: float | None = None) -> tuple[Tensor, Tensor]:
        S = matrix_inv_sqrth(P, eps=eps, rtol=rtol).double()
        C = S @ covariance(samples.double()) @ S
        return torch.trace(null.mT @ C @ null) / 27, torch.trace(support.mT @ C @ support) / 27

    for name, (own, others) in other.items():
        P = covariance(own)
        swept = [energies(P, others, eps=float(eps)) for eps in grid]
        facts[f"{name}: null"], facts[f"{name}: support"] = (torch.stack(list(e)) for e in zip(*swept, strict=True))
        facts[f"{name}: null, rtol"], facts[f"{name}: support, rtol"] = energies(P, others, rtol=1e-4)
    with drawing(path, "in the null space of the first batch", "on its support") as (left, right):
        for name, colour, dash in zip(other, (BLUE, ORANGE, RED), ("-", "--", "-."), strict=True):
            left.loglog(grid.numpy(), facts[f"{name}: null"].numpy(), color=colour, linestyle=dash, label=name)
            left.axhline(float(facts[f"{name}: null, rtol"]), color=GREEN, linestyle=dash)
        left.axhline(1, color=GREY, linestyle=":", zorder=1)
        left.annotate("as much as the signal", (1, 1.6), ha="right", fontsize=8.5, color=GREY)
        left.annotate("the same three, rtol = 1e-4", (1e-10, 4e-12), fontsize=8.5, color=GREEN)
        left.set(xlabel="eps", ylabel="whitened energy / 27", ylim=(1e-14, 1e8))
        left.legend(loc="upper right")
        name = "next batch, float32"
        right.semilogx(grid.numpy(), facts[f"{name}: support"].numpy(), color=BLUE, label="eps")
        right.axhline(float(facts[f"{name}: support, rtol"]), color=GREEN, linewidth=2.4, label="rtol = 1e-4")
        right.set(xlabel="eps", ylabel="whitened energy / 27", ylim=(0, 1.1))
        right.legend(loc="lower left")
    return facts


def _short(number: float) -> str:
    mantissa, exponent = f"{number:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def nog(path: Path, *, num_images: int = 64) -> Facts:
    """Draw the singular values of a gradient and of its polar factor, and where the first-order decrease is from."""
    generator = torch.Generator().manual_seed(1)
    conv = stem(16, generator)
    norm = DecorrelatedBatchNorm2d(16)
    outputs = norm(conv(images(num_images, 32, generator)))
    wanted = images(num_images, 30, generator).mean(1, keepdim=True)
    nn.functional.mse_loss(outputs.relu(), wanted.expand_as(outputs)).backward()
    assert conv.weight.grad is not None
    G, R = conv.weight.grad.flatten(1).double(), nearest_orthogonal_gradient(conv.weight)
    assert R is not None
    R = R.flatten(1).double()
    sizes, ones = torch.linalg.svdvals(G), torch.linalg.svdvals(R)
    titles = "singular values of the step", "first-order decrease, summed"
    with drawing(path, *titles, height=3.0) as (left, right):
        index = range(1, len(sizes) + 1)
        left.semilogy(index, (sizes / sizes[0]).numpy(), "o-", color=ORANGE, label="gradient")
        left.semilogy(index, ones.numpy(), "s-", color=BLUE, label="nearest orthogonal gradient")
        left.set(xlabel="direction", xticks=(1, 4, 8, 12, 16), ylabel="relative to the gradient's largest")
        left.legend(loc="lower left")
        right.plot(index, _shares(sizes.square()).numpy(), "o-", color=ORANGE, label="gradient")
        right.plot(index, _shares(sizes).numpy(), "s-", color=BLUE, label="nearest orthogonal gradient")
        right.set(xlabel="directions, from the largest on", xticks=(1, 4, 8, 12, 16), ylabel="share", ylim=(0, 1.05))
        right.legend(loc="lower right")
    return {"gradient": sizes, "nearest": ones, "decrease": (G * R).sum(), "inner": (conv.weight.flatten(1) * G).sum()}


def _shares(parts: Tensor) -> Tensor:
    return parts.cumsum(0) / parts.sum()


def olr(path: Path, *, num_rates: int = 200) -> Facts:
    """Draw the distance from orthogonality along the learning rate, with the rates of both rules."""
    generator = torch.Generator().manual_seed(2)
    frame = random_orthogonal(27, generator)[:16]
    noise = torch.randn(16, 27, generator=generator, dtype=torch.float64)
    gradient = nearest_orthogonal(0.35 * frame + noise / noise.norm() * 3)
    rates = torch.linspace(0, 2.0, num_rates, dtype=torch.float64)
    facts: Facts = {"rates": rates}
    titles = {"large": "W is 1.6 times an orthogonal matrix", "small": "W is 0.9 times an orthogonal matrix"}
    with drawing(path, *titles.values()) as panels:
        for axis, name, scale in zip(panels, titles, (1.6, 0.9), strict=True):
            W = scale * frame
            values = torch.stack([orthogonal_loss(W - rate * gradient) for rate in rates])
            paper = optimal_learning_rate(W, gradient)
            exact = optimal_learning_rate(W, gradient, rule="exact", max_lr=float(rates[-1]))
            axis.plot(rates.numpy(), values.numpy(), color=BLACK)
            for rate, colour, marker, label in (
                (paper, ORANGE, "o", "the paper's rule"),
                (exact, GREEN, "s", "the exact rule"),
            ):
                there = float(orthogonal_loss(W - rate * gradient))
                axis.plot(rate, there, marker, color=colour, markersize=9, zorder=3, label=f"{label}: {rate:.2f}")
            axis.set(xlabel="learning rate η", ylim=(0, None))
            axis.legend(loc="upper center")
            facts |= {f"{name}: values": values, f"{name}: rates": torch.tensor([paper, exact], dtype=torch.float64)}
        panels[0].set_ylabel("distance of W - η G from orthogonality")
    return facts


def weights(path: Path, *, num_images: int = 64) -> Facts:
    """Draw the singular values of a kernel under the three treatments, and the covariance that comes out."""
    generator = torch.Generator().manual_seed(3)
    pixels = images(num_images, 32, generator).double()
    plain = stem(16, generator).weight.detach().double()
    kernels = {
        "plain": plain,
        "spectral norm": plain / torch.linalg.matrix_norm(plain.flatten(1), 2),
        "orthogonal loss": _regularised(plain),
        "orthogonal weight": nearest_orthogonal(plain.flatten(1)).reshape(plain.shape),
    }
    patches = spectrum(covariance(nn.functional.unfold(pixels, 3).movedim(1, 0).flatten(1)))
    facts: Facts = {"patches: cond": patches.cond, "loss": orthogonal_loss(kernels["orthogonal loss"])}
    styles = ((BLACK, "o"), (ORANGE, "v"), (SKY, "^"), (BLUE, "s"))
    with drawing(path, "singular values of the kernel", "eigenvalues of the covariance behind it") as (left, right):
        for (name, kernel), (colour, marker) in zip(kernels.items(), styles, strict=True):
            told = spectrum(covariance(features(kernel, pixels)))
            facts |= {f"{name}: kernel": torch.linalg.svdvals(kernel.flatten(1)), f"{name}: cond": told.cond}
            index = range(1, 17)
            left.plot(index, facts[f"{name}: kernel"].numpy(), marker + "-", color=colour, label=name)
            label = f"{name}, κ = {float(told.cond):.0f}"
            right.semilogy(index, told.eigenvalues.numpy(), marker + "-", color=colour, label=label)
        left.set(xlabel="index", xticks=(1, 4, 8, 12, 16), ylim=(0, 1.5))
        left.legend(loc="upper right", ncols=2)
        right.set(xlabel="index", xticks=(1, 4, 8, 12, 16), ylim=(2e-3, 40))
        right.legend(loc="upper right")
    return facts


def _regularised(weight: Tensor, steps: int = 40, rate: float = 0.02) -> Tensor:
    """Return the weight after some steps of gradient descent on the orthogonal loss."""
    for _ in range(steps):
        weight = weight.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(orthogonal_loss(weight), weight)
        weight = (weight - rate * gradient).detach()
    return weight


def operator(path: Path, *, size: int = 8, channels: int = 4) -> Facts:
    """Draw the singular values of a convolution as a map of images, for both kinds of orthogonal weight."""
    facts: Facts = {}
    basis = torch.eye(channels * size * size).reshape(-1, channels, size, size)
    for kind in ("kernel", "operator"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            conv = nn.Conv2d(channels, channels, 3, padding=1, padding_mode="circular", bias=False)
            if kind == "kernel":
                nn.init.orthogonal_(conv.weight)
            orthogonal_weight(conv, kind=kind, normalize=False)
        with torch.no_grad():
            facts[kind] = torch.linalg.svdvals(conv(basis).flatten(1).double())
    with drawing(path, "singular values of a convolution, as a map of images", height=2.8) as (axis,):
        index = torch.linspace(0, 1, len(basis)).numpy()
        axis.plot(index, facts["kernel"].numpy(), color=ORANGE, linestyle="--", label='kind="kernel"')
        axis.plot(index, facts["operator"].numpy(), color=BLUE, label='kind="operator"')
        axis.set(xlabel="index, as a share of their number", ylim=(0, None))
        axis.legend()
    return facts


def proposition(path: Path, *, num_pairs: int = 500) -> Facts:
    """Draw the paper's optimal rate for pairs of random orthogonal matrices, with the bounds of Proposition 1."""
    generator = torch.Generator().manual_seed(4)
    facts: Facts = {}
    for n in (8, 64):
        products, rates = [], []
        for _ in range(num_pairs):
            W, G = random_orthogonal(n, generator), random_orthogonal(n, generator)
            products.append((W * G).sum())
            rates.append(optimal_learning_rate(W, G))
        facts |= {f"products, {n}": torch.stack(products), f"rates, {n}": torch.tensor(rates, dtype=torch.float64)}
    with drawing(path, "η* against ⟨W, G⟩, N = 8", f"η* of {num_pairs} random pairs, N = 64") as (left, right):
        t = torch.linspace(-8, 8, 400, dtype=torch.float64)
        left.axvspan(1, 8, color=GREEN, alpha=0.1, linewidth=0)
        left.plot(t.numpy(), (t / 8 / (1 + 2 * (t / 8) ** 2)).numpy(), color=BLACK)
        left.plot(facts["products, 8"].numpy(), facts["rates, 8"].numpy(), ".", color=RED, label="random pairs")
        for bound, colour, label in (
            (64 / 66, GREY, "the paper's bounds"),
            (1 / 66, GREY, None),
            (8**-0.5, BLUE, "the tight ones"),
            (8 / 66, BLUE, None),
        ):
            left.axhline(bound, color=colour, linestyle="--" if colour == GREY else ":", label=label)
        left.annotate("the premise\n⟨W, G⟩ ≥ 1", (4.5, -0.3), ha="center", color=GREEN, fontsize=9)
        left.set(xlabel="⟨W, G⟩", ylabel="η*", xticks=range(-8, 9, 4), ylim=(-0.45, 1.05))
        left.legend(loc="upper left", bbox_to_anchor=(0, 0.93))
        rates_64, holds = facts["rates, 64"], facts["products, 64"] >= 1
        bins = torch.linspace(-0.064, 0.064, 33).tolist()
        parts = [rates_64[~holds].numpy(), rates_64[holds].numpy()]
        right.hist(parts, bins=bins, stacked=True, color=[RED, GREEN], label=["the premise fails", "it holds"])
        right.axvline(1 / (64**2 + 2), color=GREY, linestyle="--", label="the paper's lower bound")
        right.set(xlabel="η*", ylabel="pairs", xlim=(-0.1, 0.064), xticks=(-0.08, -0.04, 0, 0.04))
        right.legend(loc="upper left")
    return facts


def muon(path: Path, *, n: int = 64) -> Facts:
    """Draw what Muon's iteration and ours make of singular values, and how far they are from the polar factor."""
    generator = torch.Generator().manual_seed(5)
    U, V = random_orthogonal(n, generator), random_orthogonal(n, generator)
    conditions = torch.logspace(0, 5, 21, dtype=torch.float64)
    solvers: dict[str, Callable[[Tensor], Tensor]] = {
        "Muon": _muon_step,
        "newton_schulz": lambda G: nearest_orthogonal(G, solver="newton_schulz"),
        "gram": nearest_orthogonal,
    }
    errors: dict[str, list[Tensor]] = {name: [] for name in solvers}
    for kappa in conditions.tolist():
        G = ((U * torch.logspace(0, -math.log10(kappa), n, dtype=torch.float64)) @ V.mT).float()
        for name, solve in solvers.items():
            errors[name].append(torch.linalg.matrix_norm(solve(G).double() - U @ V.mT) / n**0.5)
    facts: Facts = {f"error: {name}": torch.stack(e) for name, e in errors.items()} | {"conditions": conditions}
    sizes = torch.logspace(0, -5, n, dtype=torch.float64)
    G = ((U * sizes) @ V.mT).float()
    for name, solve in solvers.items():
        facts[f"values: {name}"] = (U * (solve(G).double() @ V)).sum(0)  # the diagonal of U^T R V
    facts["sizes"] = sizes / sizes.norm()
    styles = {"Muon": (RED, "o"), "newton_schulz": (SKY, "^"), "gram": (BLUE, "s")}
    labels = {"Muon": "Muon, 5 steps in bfloat16", "newton_schulz": 'ours, "newton_schulz"', "gram": 'ours, "gram"'}
    with drawing(path, "each singular value, before and after", "error of the whole matrix") as (left, right):
        for name, (colour, marker) in styles.items():
            after = facts[f"values: {name}"].numpy()
            left.semilogx(
                facts["sizes"].numpy(), after, marker + "-", color=colour, markersize=3, linewidth=1, label=labels[name]
            )
            right.loglog(
                conditions.numpy(),
                facts[f"error: {name}"].numpy(),
                marker + "-",
                color=colour,
                markersize=3.5,
                label=labels[name],
            )
        left.axhline(1, color=GREY, linestyle=":")
        left.set(xlabel="singular value / Frobenius norm", ylabel="singular value of the step", ylim=(-0.05, 1.35))
        left.legend(loc="lower right")
        right.set(xlabel="condition number of the gradient", ylabel="relative error", ylim=(1e-8, 3))
    return facts


def _muon_step(gradient: Tensor) -> Tensor:
    """Return what `torch.optim.Muon` subtracts from a square weight in its first step, with a learning rate of 1."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
    weight.grad = gradient.clone()
    optimizer.step()
    return -weight.detach()


PICTURES: Sequence[Callable[[Path], Facts]] = (
    cloud,
    condition,
    gradients,
    null_space,
    nog,
    olr,
    weights,
    operator,
    proposition,
    muon,
)
"""All of them; each is written to a file of its own name."""


def main(folder: Path) -> None:
    """Write every picture into a folder."""
    for picture in PICTURES:
        picture(folder / f"{picture.__name__}.png")


if __name__ == "__main__":
    main(Path(__file__).parent)
