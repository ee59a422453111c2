"""Which orthogonal weight trains with the nearest orthogonal gradient? Train small ResNets on CIFAR-10 and see.

    python results/orthogonal_weight/run.py CIFAR_DIR [--seeds 2] [--steps 200] [--worker 0/1]

Kernel and operator, as the paper's formula has them and with the exponent bounded (``normalize``), alone, with nog, and
with nog+olr. The operator runs on the narrow stem alone: on 64 channels of 32x32 it is too slow for a CPU. Each
finished run adds a line to runs.jsonl beside this file; runs that are there already are not repeated.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import orthocond
from orthocond.nn import DecorrelatedBatchNorm2d

sys.path.insert(0, str(Path(__file__).parents[1]))
from cifar_small import STEMS, batches, error, experiment, mean_and_std, network, optimizer_and_schedule

METHODS = {"svd": "none", "svd+nog": "nog"}
for spec, kind, normalize in itertools.product(("ow", "nog+ow", "nog+ow+olr"), ("kernel", "operator"), (False, True)):
    METHODS[f"svd+{spec}, {kind}{', bounded' if normalize else ''}"] = spec.replace(
        "ow", f"ow(kind={kind}, normalize={normalize})"
    )


def run(train, test, stem, method, seed, steps):
    torch.manual_seed(seed)
    model = network(STEMS[stem], DecorrelatedBatchNorm2d(STEMS[stem], rtol=1e-3)).train()
    treatment = orthocond.treat(model, "0", METHODS[method])
    optimizer, make_schedule = optimizer_and_schedule(model, steps)
    treatment.attach(optimizer)
    schedule = make_schedule()
    losses, rates, switched = [], [], 0
    with orthocond.ConditionMonitor(model, rtol=1e-3) as monitor:
        for x, y in batches(train, steps):
            loss = F.cross_entropy(model(x), y) + treatment.penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if treatment.last is not None:
                rates.append(treatment.last.learning_rate)
                switched += treatment.last.switched
    late = [record["cond_support"] for record in monitor.history()[steps // 2 :]]
    return {
        "loss": float(np.mean(losses[-20:])),
        "error": error(model.eval(), *test),
        "cond_support": float(np.median(late)),
        "rate": float(np.mean(rates)) if rates else None,
        "switched": switched / steps,
        "raw_norm": float(treatment.parameter.detach().norm()),
    }


def table(records):
    """Return a Markdown table, mean and standard deviation over the seeds."""
    lines = [
        "| stem | method | test error | training loss | condition number | rate used | norm of raw tensor | seeds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for stem, method in itertools.product(STEMS, METHODS):
        rows = [r for r in records if (r["stem"], r["method"]) == (stem, method)]
        if not rows:
            continue
        rates = [r["rate"] for r in rows if r["rate"] is not None]
        cells = [
            mean_and_std([r["error"] for r in rows]),
            f"{np.mean([r['loss'] for r in rows]):.2f}",
            f"{np.median([r['cond_support'] for r in rows]):.0f}",
            f"{np.mean(rates):.3f}" if rates else "",
            f"{np.mean([r['raw_norm'] for r in rows]):.1f}",
            str(len(rows)),
        ]
        lines.append(f"| {stem} | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    every = itertools.product(STEMS, METHODS)
    slow = ("rank-deficient", "operator")
    cases = [{"stem": s, "method": m} for s, m in every if not (s == slow[0] and slow[1] in m)]
    experiment(__file__, cases, run, table, seeds=2)
