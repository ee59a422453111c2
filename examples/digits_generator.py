"""Train a generator of digits by the Frechet distance alone, where the usual formula has no gradient.

The generator is asked for a digit, and its images of that digit are compared with the scans of it: ten distances, each
between Gaussians fitted to 32 images of 64 pixels. With fewer images than pixels both covariances are singular.

python examples/digits_generator.py [PICTURE]
"""

import sys
from functools import partial

import torch
from torch import Tensor, nn

from orthocond.lab.data import digits
from orthocond.linalg import covariance, frechet_distance

BATCH, LATENT, STEPS = 32, 16, 300


class Generator(nn.Module):
    """Noise and a digit to an image of 8x8 pixels between 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.digit = nn.Embedding(10, LATENT)
        self.layers = nn.Sequential(
            nn.Linear(2 * LATENT, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Return images ``(10, N, 64)``, N of each digit, from noise ``(10, N, LATENT)``."""
        digit = self.digit.weight.unsqueeze(1).expand(-1, noise.shape[1], -1)
        images: Tensor = self.layers(torch.cat([noise, digit], -1))
        return images


def scans() -> list[Tensor]:
    """Return the scans of each digit, ``(N, 64)``."""
    images, _ = digits()
    pixels = images.pixels.float().flatten(1)
    return [pixels[images.labels == digit] / pixels.max() for digit in range(10)]


def usual_formula(X: Tensor, Y: Tensor) -> Tensor:
    """Return the distance between samples ``(..., N, d)`` as it is usually written, by the eigenvalues of ``A B``."""
    A, B = (covariance(samples, dim=-2) for samples in (X, Y))
    traces = (A + B).diagonal(dim1=-2, dim2=-1).sum(-1)
    return (X.mean(-2) - Y.mean(-2)).square().sum(-1) + traces - 2 * torch.linalg.eigvals(A @ B).sqrt().real.sum(-1)


def main() -> None:
    """Train, and print the distance to 100 scans of each digit, before and after."""
    torch.manual_seed(0)
    by_digit = scans()
    model = Generator()
    fixed = torch.randn(10, 100, LATENT)
    reference = torch.stack([images[:100] for images in by_digit])

    def distance() -> float:
        return frechet_distance(model(fixed), reference, dim=-2).mean().item()

    for name, formula in (("usual formula", usual_formula), ("frechet_distance", partial(frechet_distance, dim=-2))):
        value = formula(model(fixed[:, :BATCH]), reference).mean()
        (gradient,) = torch.autograd.grad(value, model.digit.weight)
        print(f"{name}: distance {value.item():.3f}, norm of the gradient {gradient.norm().item():.3g}")
    before, first = model(fixed).detach(), distance()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        real = torch.stack([images[torch.randint(len(images), (BATCH,))] for images in by_digit])
        loss = frechet_distance(model(torch.randn(10, BATCH, LATENT)), real, dim=-2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:3}: loss {loss.item():.3f}")
    print(f"distance before: {first:.3f}")
    print(f"distance after:  {distance():.3f}")
    if len(sys.argv) > 1:
        draw(sys.argv[1], {"before": before, "after": model(fixed).detach(), "scans": reference})


def draw(file: str, rows: dict[str, Tensor]) -> None:
    """Draw eight images of each digit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(rows), figsize=(9, 4), layout="constrained")
    for panel, (name, images) in zip(axes, rows.items(), strict=True):
        framed = nn.functional.pad(images[:, :8].unflatten(-1, (8, 8)), (1, 1, 1, 1))
        grid = framed.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        panel.imshow(grid, cmap="gray_r", vmin=0, vmax=1)
        panel.set(title=name, xticks=[], yticks=[])
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
