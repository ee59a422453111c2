"""The optimal learning rate."""

from typing import TYPE_CHECKING, Any

from orthocond.errors import ArgumentError, check_choice
from orthocond.optim import RULES, optimal_learning_rate
from orthocond.treatments._part import Note, Part

if TYPE_CHECKING:
    from orthocond.treatments._step import Step
    from orthocond.treatments._target import Target

__all__ = ["OptimalLearningRate"]


class OptimalLearningRate(Part):
    r"""Uses the learning rate :math:`\eta^*` that makes the weight as orthogonal as possible, if it is smaller.

    It computes the rate for the weight that the layer uses: with ``ow`` that is the orthogonal one.

    Args:
        rule: one of `orthocond.optim.RULES`.
        steps: act in the first ``steps`` steps only (the paper's source mentions the first epochs); None for all.
        negative: use a negative :math:`\eta^*` as well, as in the switch of eq. 21. That is a step uphill, so by
            default only :math:`0 < \eta^* < lr` is used.

    Example:
        >>> OptimalLearningRate(rule="exact", steps=2000)
        olr(rule=exact, steps=2000)
    """

    name = "olr"
    description = "Optimal learning rate: eta*, after which the weight is nearest to orthogonal, where 0 < eta* < lr."
    reference = "Song, Sebe, Wang 2022, eqs. 18 to 21"
    acts_on = "learning rate"
    order = 70
    notes = (
        Note("eta", "optimal learning rate eta*"),
        Note("switched", "eta* was used as the learning rate", kind="flag"),
    )

    def __init__(self, *, rule: str = "paper", steps: int | None = None, negative: bool = False) -> None:
        check_choice(rule, RULES, "rule", "olr")
        if steps is not None and steps < 1:
            raise ArgumentError(f"olr expected steps >= 1, got steps={steps}; leave it out to act in every step.")
        self.rule, self.steps, self.negative = rule, steps, negative
        self._num_steps = 0

    def install(self, target: "Target") -> None:
        """Warn about combinations in which the rate goes to zero."""
        names = set(target.parts)
        if ("ow" in names) != ("nog" in names):
            target.warn(
                "olr with only one of ow and nog: the paper argues that the optimal learning rate goes to zero there "
                "(section 5.2); use both or neither."
            )
        if self.rule == "exact" and "ow" in names and target.parts["ow"].options.get("kind") == "kernel":
            target.warn(
                "olr with rule=exact finds no step that improves on the orthogonal weight of ow, so its rate is "
                "rounding noise around zero; use rule=paper."
            )

    def act(self, step: "Step") -> None:
        """Set the rate where the optimal one is smaller."""
        if self.steps is not None:
            if self._num_steps >= self.steps:
                return
            self._num_steps += 1
        rate, weight, gradient = step.rate, step.weight, -step.gradient if step.is_ascent else step.gradient
        eta = optimal_learning_rate(
            weight.flatten(0, -2),
            gradient.flatten(0, -2),
            rule=self.rule,
            max_lr=rate if self.rule == "exact" else None,
            groups=len(weight) if weight.ndim == 3 else 1,
        )
        is_smaller = eta < rate and (eta > 0 or self.negative)
        step.note(eta=eta, switched=is_smaller)
        if is_smaller:
            step.rate = eta

    def state_dict(self) -> dict[str, Any] | None:
        """Return the number of steps taken, where they are counted."""
        return None if self.steps is None else {"num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over the number of steps."""
        self._num_steps = 0 if state is None else state["num_steps"]
