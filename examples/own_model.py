"""Put whitening into a model of your own, watch its condition number, and fold it for inference.

python examples/own_model.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import orthocond
from orthocond.nn import convert_batchnorm, fold

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1, bias=False),  # 64 channels from 27 inputs: a covariance of rank 27
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(1024, 10),
)
convert_batchnorm(model, ["1"])  # the first norm becomes a decorrelated one
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with orthocond.ConditionMonitor(model) as monitor:
    for _ in range(30):
        x, y = torch.randn(32, 3, 16, 16), torch.randint(10, (32,))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

for record in monitor.history()[::10]:
    print(
        f"step {record['step']:2}: rank {record['rank']}, condition number on the support {record['cond_support']:.1f}"
    )

x = torch.randn(4, 3, 16, 16)
deployed = fold(model)
print(deployed)
print("largest difference after folding:", (deployed(x) - model.eval()(x)).abs().max().item())
