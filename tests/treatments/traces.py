"""Writes down what every treatment does to the bit, and compares: for a change that is to change nothing.

    python tests/treatments/traces.py write /tmp/before.traces      # with the code as it was
    python tests/treatments/traces.py compare /tmp/before.traces    # with the code as it is now

Each trace is five steps of one specification with one optimizer on one kind of layer: the weights after every step, and
what ``treatment.last`` says. Traces are equal to the bit on one machine alone, so none are kept in the repository.
"""

import itertools
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import orthocond
from orthocond.nn import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d

NAMES = ("nog", "sn", "ol", "ow", "olr", "gauge")
NOTES = ("learning_rate", "eta", "switched", "gradient_range", "gauged", "cond_before", "cond_after")
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}
LAYERS = {
    "conv": (lambda: nn.Conv2d(3, 8, 3, padding=1), lambda: DecorrelatedBatchNorm2d(8), (3, 6, 6)),
    "grouped": (
        lambda: nn.Conv2d(4, 8, 3, padding=1, groups=2), lambda: DecorrelatedBatchNorm2d(8, groups=2), (4, 6, 6)
    ),
    "transposed": (lambda: nn.ConvTranspose2d(3, 8, 3), lambda: DecorrelatedBatchNorm2d(8), (3, 4, 4)),
    "linear": (lambda: nn.Linear(12, 8), lambda: DecorrelatedBatchNorm1d(8), (12,)),
}  # fmt: skip
WITH_OPTIONS = {
    "ow(kind=operator)": ["conv"],
    "ow(kind=operator)+nog+olr": ["conv"],
    "ow(normalize=false)+nog+olr": list(LAYERS),
    "olr(rule=exact)": list(LAYERS),
    "nog(solver=svd)+ow": list(LAYERS),
    "ol(penalty_weight=0.5)+nog": list(LAYERS),
    "gauge(scale=unit, momentum=transform)+nog": list(LAYERS),
    "gauge(scale=weight, momentum=reset, threshold=3.0)": list(LAYERS),
    "gauge(metric=weight)+olr(rule=exact)": list(LAYERS),
}


def specifications():
    """Return the allowed subsets of the treatments on every layer, and some with options."""
    for size in range(len(NAMES) + 1):
        for names in itertools.combinations(NAMES, size):
            if "gauge" not in names or not {"sn", "ow"} & set(names):
                yield "+".join(names) or "none", list(LAYERS)
    yield from WITH_OPTIONS.items()


def trace(spec, layer, optimizer):
    """Return weights and notes of five steps."""
    make, norm, shape = LAYERS[layer]
    torch.manual_seed(0)
    model = nn.Sequential(make(), norm(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(4))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 24, *shape, generator=generator)
    x = F.avg_pool2d(x.flatten(0, 1), 3, 1, 1).view_as(x) if x.ndim == 5 else x * torch.linspace(1, 0.05, 12)
    model(x[0])
    treatment = orthocond.treat(model, "0", spec)
    opt = OPTIMIZERS[optimizer](model.parameters())
    treatment.attach(opt)
    steps = []
    for batch in x:
        opt.zero_grad()
        (F.cross_entropy(model(batch), torch.arange(24) % 4) + treatment.penalty()).backward()
        opt.step()
        weights = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        last = treatment.last
        steps.append((weights, last and {name: getattr(last, name) for name in NOTES}))
    return steps


def traces():
    """Return all traces by specification, layer and optimizer."""
    return {
        f"{spec} | {layer} | {optimizer}": trace(spec, layer, optimizer)
        for spec, layers in specifications()
        for layer in layers
        for optimizer in OPTIMIZERS
    }


def differences(before, after):
    """Yield a line for each trace that is not the same."""
    for key, steps in before.items():
        for number, ((weights, notes), (new_weights, new_notes)) in enumerate(zip(steps, after[key], strict=True)):
            changed = [name for name, value in weights.items() if not torch.equal(value, new_weights[name])]
            if notes != new_notes:
                changed.append(f"last: {notes} != {new_notes}")
            if changed:
                yield f"{key}, step {number}: {', '.join(changed)}"
                break


def main():
    """Write or compare."""
    what, file = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = traces()
    if what == "write":
        torch.save(found, file)
        print(f"{len(found)} traces written to {file}")
        return
    lines = list(differences(torch.load(file, weights_only=True), found))
    print("\n".join([*lines, f"{len(lines)} of {len(found)} traces differ"]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
