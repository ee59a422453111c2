"""Learn which correspondences to trust: weighted Procrustes inside a network, with a third of the points wrong.

python examples/alignment_with_outliers.py [PICTURE]
"""

import sys

import torch
from torch import Tensor, nn

from orthocond.linalg import nearest_rotation, procrustes

NUM_POINTS, OUTLIERS, NOISE = 40, 13, 0.02  # noise: standard deviation, for points of standard deviation 1


def problems(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return points, where they were seen, and the true rotation; a third of what was seen is somewhere else."""
    X = torch.randn(batch, NUM_POINTS, 3, generator=generator)
    R = nearest_rotation(torch.randn(batch, 3, 3, generator=generator))
    Y = X @ R.mT + torch.randn(batch, 1, 3, generator=generator)
    Y = Y + NOISE * torch.randn(Y.shape, generator=generator)
    Y[:, :OUTLIERS] = torch.randn(batch, OUTLIERS, 3, generator=generator) + Y[:, :1]
    return X, Y, R


class Alignment(nn.Module):
    """Aligns, looks at what is left over for each point, weighs the points by it, and aligns again."""

    def __init__(self, rounds: int = 3) -> None:
        super().__init__()
        self.weigh = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1), nn.Softplus()) for _ in range(rounds)
        )

    def forward(self, X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotations and weights."""
        weights = torch.ones_like(X[..., 0])
        for weigh in self.weigh:
            found = procrustes(X, Y, weights)
            left = (Y - X @ found.rotation.mT - found.translation.unsqueeze(-2)).square().sum(-1)
            typical = left.median(-1, keepdim=True).values
            weights = weigh(torch.stack([(left + 1e-6).log(), (left / (typical + 1e-6) + 1e-3).log()], -1)).squeeze(-1)
        return procrustes(X, Y, weights).rotation, weights


def degrees(R: Tensor, truth: Tensor) -> Tensor:
    """Return the angle between rotations."""
    cosine = ((R.mT @ truth).diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
    return cosine.clamp(-1, 1).acos().rad2deg()


def main() -> None:
    """Train, and print the median error with and without learned weights."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Alignment()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(100):
        X, Y, truth = problems(32, generator)
        loss = (model(X, Y)[0] - truth).square().sum((-2, -1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3}: loss {loss.item():.4f}")
    X, Y, truth = problems(500, generator)
    with torch.no_grad():
        R, weights = model(X, Y)
        plain = degrees(procrustes(X, Y).rotation, truth)
        learned = degrees(R, truth)
    share = weights[:, :OUTLIERS].sum() / weights.sum()
    print(f"median error, equal weights:   {plain.median().item():6.2f} degrees")
    print(f"median error, learned weights: {learned.median().item():6.2f} degrees")
    print(f"weight of the wrong third:     {100 * share.item():6.2f} percent")
    if len(sys.argv) > 1:
        draw(sys.argv[1], plain, learned)


def draw(file: str, plain: Tensor, learned: Tensor) -> None:
    """Draw how the errors are distributed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name, errors in (("equal weights", plain), ("learned weights", learned)):
        ordered = errors.sort().values
        axes.plot(ordered, torch.linspace(0, 100, len(ordered)), label=name)
    axes.set(xscale="log", xlabel="error of the rotation in degrees", ylabel="percent of problems below")
    axes.legend()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
