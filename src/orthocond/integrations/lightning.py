"""Callbacks for Lightning's ``Trainer``: treatments, and condition numbers in the logger."""

from typing import Any

from orthocond.integrations.callbacks import Treating, Watching
from orthocond.treatments import Treatment, TreatmentGroup

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    raise ImportError("orthocond.integrations.lightning needs Lightning; run: pip install lightning.") from None

__all__ = ["ConditionCallback", "TreatmentCallback"]


class _LoggingCallback(Callback):
    """A callback whose numbers go to all loggers, at the steps of the optimizer that the trainer logs."""

    _step_before = 0

    def numbers(self) -> dict[str, float]:
        """Return what is logged."""
        raise NotImplementedError

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Take note of the step: a batch whose gradient is accumulated takes none."""
        self._step_before = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Log the numbers, if the trainer logs after this step."""
        every: int = getattr(trainer, "log_every_n_steps", 0)
        if not trainer.is_global_zero or not trainer.loggers or every < 1:
            return
        if trainer.global_step // every > self._step_before // every:
            metrics = self.numbers()
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step - 1)


class TreatmentCallback(Treating, _LoggingCallback):
    """Puts a treatment on a layer of the LightningModule.

    The weight is treated when the trainer sets the module up, and the treatment is attached to the optimizer that
    ``configure_optimizers`` returns. The gradient of the penalty of ``ol`` is added in each step. What each step did is
    logged as ``treatment/<layer>/<number>``, and the state is in the trainer's checkpoints.

    Args:
        layer: dotted name of the layer in the LightningModule; ``"auto"``, ``"first"`` or ``"all"`` as in `treat`.
        spec: the treatment, as in `treat`.
        example_input: one batch of the module's input, where `treat` needs one; the module's ``example_input_array``
            unless given.

    Example:
        >>> TreatmentCallback("model.conv1", "nog+ow+olr")
        TreatmentCallback(layer='model.conv1', spec='nog+ow+olr')
    """

    @property
    def state_key(self) -> str:
        """The key of the state in checkpoints, one for each layer."""
        return self._generate_state_key(layer=self.layer)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Treat the layer, unless this module is treated already."""
        self.treat(pl_module, pl_module.example_input_array)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the treatment, before the optimizer's state is restored."""
        assert self.treatment is not None
        self.treatment.detach()  # from the optimizer of a fit that was interrupted
        self.treatment.attach(holding(self.treatment, trainer.optimizers), penalty=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach the treatment; the weight stays as it is, and a second fit attaches it again."""
        if self.treatment is not None:
            self.treatment.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the treatment's state for the trainer's checkpoint."""
        return {} if self.treatment is None else self.treatment.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the treatment's state."""
        if self.treatment is not None and state_dict:
            self.treatment.load_state_dict(state_dict)


class ConditionCallback(Watching, _LoggingCallback):
    """Logs rank and condition numbers of the module's meta-layers, as ``condition/<layer>/<number>``.

    The newest record is logged every ``log_every_n_steps`` steps of the trainer, to all of its loggers.

    Args:
        every: record every ``every``-th training forward of each layer.
        layers: dotted names of further layers whose input is watched.
        rtol: the cut for rank and ``cond_support``, as in `ConditionMonitor`.

    Example:
        >>> ConditionCallback(layers=["model.bn1"], every=10)
        ConditionCallback(every=10, layers=['model.bn1'], rtol=None)
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch, in the process that logs."""
        self.stop()  # a fit that was interrupted
        if trainer.is_global_zero:
            self.watch(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop watching."""
        self.stop()


def holding(treatment: Treatment | TreatmentGroup, optimizers: list[Any]) -> Any:
    """Return the optimizer that holds the parameters of a treatment; where none does, the first, which is refused."""
    treatments = treatment.treatments.values() if isinstance(treatment, TreatmentGroup) else [treatment]
    wanted = {id(one.parameter) for one in treatments}
    for optimizer in optimizers:
        if wanted & {id(held) for group in optimizer.param_groups for held in group["params"]}:
            return optimizer
    return optimizers[0] if optimizers else None
