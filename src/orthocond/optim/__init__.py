"""What acts on a step: the nearest orthogonal gradient and the optimal learning rate."""

from orthocond.optim._gradient import nearest_orthogonal_gradient
from orthocond.optim._learning_rate import RULES, optimal_learning_rate

__all__ = ["RULES", "nearest_orthogonal_gradient", "optimal_learning_rate"]
