"""Camera pose from 2D-3D correspondences by the smallest eigenvector, trained end to end, with a third of them wrong.

python examples/pose_from_points.py [PICTURE]

The direct linear transform: the camera matrix is the eigenvector of A^T W A, 12x12, that belongs to the smallest
eigenvalue, where each correspondence has two rows in A and a weight in W. A network predicts the weights. Some of its
first guesses leave too few points, and then several eigenvalues are zero: the gradient through eigenvectors is not
finite there, that of `top_eigenvector` is.
"""

import sys

import torch
from torch import Tensor, nn

import orthocond
from orthocond.linalg import nearest_rotation, top_eigenvector

NUM_POINTS, OUTLIERS, NOISE = 24, 8, 1e-3  # noise: standard deviation in the image, whose width is about 1


def problems(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return points in space, where they were seen in the image, descriptors of the matches, and the true rotation."""
    X = torch.randn(batch, NUM_POINTS, 3, generator=generator)
    R = nearest_rotation(torch.randn(batch, 3, 3, generator=generator))
    seen = X @ R.mT + torch.tensor([0.0, 0.0, 6.0])
    image = seen[..., :2] / seen[..., 2:] + NOISE * torch.randn(batch, NUM_POINTS, 2, generator=generator)
    image[:, :OUTLIERS] = 0.5 * torch.randn(batch, OUTLIERS, 2, generator=generator)
    # What a matcher would give: a score that tells wrong from right, but not on its own.
    is_wrong = torch.arange(NUM_POINTS) < OUTLIERS
    descriptors = torch.randn(batch, NUM_POINTS, 8, generator=generator)
    descriptors[..., 0] += torch.where(is_wrong, 1.5, -1.5)
    descriptors[..., 1] += torch.where(is_wrong, -1.5, 1.5)
    return X, image, descriptors, R


class Pose(nn.Module):
    """Weights from descriptors, the pose from the weighted correspondences."""

    def __init__(self, smallest_eigenvector=lambda M: top_eigenvector(M, largest=False)) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.smallest_eigenvector = smallest_eigenvector

    def forward(self, X: Tensor, image: Tensor, descriptors: Tensor) -> Tensor:
        """Return the rotations of the camera."""
        scores = self.weigh(descriptors).squeeze(-1)
        weights = scores.sigmoid() * (scores > 0)
        ones = torch.ones_like(X[..., :1])
        point, zero = torch.cat([X, ones], -1), torch.zeros(*X.shape[:-1], 4)
        rows = [
            torch.cat([point, zero, -image[..., :1] * point], -1),
            torch.cat([zero, point, -image[..., 1:] * point], -1),
        ]
        A = torch.cat(rows, -2)
        M = A.mT @ (torch.cat([weights, weights], -1).unsqueeze(-1) * A)
        P = self.smallest_eigenvector(M).unflatten(-1, (3, 4))
        # The camera matrix is known up to a factor: the points are in front of it.
        depth = (point @ P[..., 2, :].unsqueeze(-1)).mean((-2, -1))
        return nearest_rotation(P[..., :3] * torch.where(depth < 0, -1.0, 1.0)[..., None, None])


def degrees(R: Tensor, truth: Tensor) -> Tensor:
    """Return the angle between rotations."""
    cosine = ((R.mT @ truth).diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
    return cosine.clamp(-1, 1).acos().rad2deg()


def train(spec: str = "none", steps: int = 120) -> tuple[list[float], Tensor]:
    """Return the losses, and the errors on new problems, with a treatment of the layer that makes the weights."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Pose()
    treatment = orthocond.treat(model, "weigh.2", spec)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    treatment.attach(optimizer)
    losses = []
    for _ in range(steps):
        X, image, descriptors, truth = problems(32, generator)
        loss = (model(X, image, descriptors) - truth).square().sum((-2, -1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    X, image, descriptors, truth = problems(500, generator)
    with torch.no_grad():
        return losses, degrees(model(X, image, descriptors), truth)


def main() -> None:
    """Show what is wrong with the usual way, and train the other one."""
    torch.manual_seed(0)
    by_hand = Pose(smallest_eigenvector=lambda M: torch.linalg.eigh(M).eigenvectors[..., 0])
    with torch.no_grad():
        by_hand.weigh[2].bias.fill_(-0.2)  # few points at first, and none at all in some images
    X, image, descriptors, truth = problems(32, torch.Generator().manual_seed(1))
    with orthocond.diagnose(by_hand) as diagnosis:
        (by_hand(X, image, descriptors) - truth).square().mean().backward()
    print(diagnosis)
    print(f"the network's gradient, by hand: {by_hand.weigh[2].weight.grad.norm().item()}")

    results = {spec: train(spec) for spec in ("none", "nog")}
    for spec, (losses, errors) in results.items():
        print(f"{spec}: loss {losses[0]:.3f} to {losses[-1]:.3f}, median error {errors.median().item():.2f} degrees")
    if len(sys.argv) > 1:
        draw(sys.argv[1], results)


def draw(file: str, results: dict[str, tuple[list[float], Tensor]]) -> None:
    """Draw the losses, and how the errors are distributed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for spec, (losses, errors) in results.items():
        left.plot(losses, label=spec)
        ordered = errors.sort().values
        right.plot(ordered, torch.linspace(0, 100, len(ordered)), label=spec)
    left.set(yscale="log", xlabel="step", ylabel="loss")
    right.set(xscale="log", xlabel="error of the rotation in degrees", ylabel="percent of problems below")
    right.legend(title="treatment")
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
