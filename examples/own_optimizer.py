"""Treat the layer in front of a whitening layer, with your own optimizer and scheduler.

python examples/own_optimizer.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import orthocond
from orthocond.nn import DecorrelatedBatchNorm2d

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1, bias=False),
    DecorrelatedBatchNorm2d(16),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(256, 10),
)
x = torch.randn(8, 3, 16, 16)
print("Pre-SVD layers:", orthocond.find_pre_svd(model, x))

treatment = orthocond.treat(model, "auto", "nog+ow+olr", example_input=x)  # before the optimizer
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
treatment.attach(optimizer)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)

for step in range(30):
    x, y = torch.randn(32, 3, 16, 16), torch.randint(10, (32,))
    loss = F.cross_entropy(model(x), y) + treatment.penalty()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 10 == 0:
        print(f"step {step:2}: loss {loss.item():.3f}, {treatment.last}")

print("still orthogonal:", orthocond.nn.is_orthogonal(model[0].weight, atol=1e-5))
