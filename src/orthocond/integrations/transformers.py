"""Callbacks for the ``Trainer`` of Hugging Face Transformers: treatments, and condition numbers in its logs."""

import gc
from typing import Any

from orthocond.errors import ArgumentError
from orthocond.integrations.callbacks import Treating, Watching

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import DefaultFlowCallback
except ImportError:
    raise ImportError(
        "orthocond.integrations.transformers needs Transformers and Accelerate; "
        "run: pip install transformers accelerate."
    ) from None

__all__ = ["ConditionCallback", "TreatmentCallback"]


class _LoggingCallback(TrainerCallback):
    """A callback whose numbers go into the trainer's logs, before the callbacks that report them see them."""

    def numbers(self) -> dict[str, float]:
        """Return what is logged."""
        raise NotImplementedError

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **_: Any) -> None:
        """Add the numbers to the logs of training, and to the trainer's ``log_history``."""
        if logs and "loss" in logs:
            metrics = self.numbers()
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    def _go_first(self) -> None:
        """Move to the front of the trainer's callbacks: reporters (TensorBoard, W&B) read the logs in that order.

        The trainer gives its callbacks no access to their list, so it is looked up among the objects that hold this
        one. Where it isn't found, the numbers are in the ``log_history`` alone.
        """
        for holder in gc.get_referrers(self):
            if isinstance(holder, list) and any(isinstance(other, DefaultFlowCallback) for other in holder):
                holder.remove(self)
                holder.insert(0, self)


class TreatmentCallback(Treating, _LoggingCallback):
    """Puts a treatment on a layer of the trainer's model.

    The weight is treated when the ``Trainer`` is made, and the treatment is attached to the optimizer that the trainer
    makes. The gradient of the penalty of ``ol`` is added in each step. What the last step did is logged as
    ``treatment/<layer>/<number>``. The treatment's state is in ``optimizer.pt`` of the trainer's checkpoints.

    Args:
        layer: dotted name of the layer in the model; ``"auto"``, ``"first"`` or ``"all"`` as in `treat`.
        spec: the treatment, as in `treat`.
        example_input: one batch of the model's input, where `treat` needs one.

    Raises:
        ArgumentError: in ``train()``, if the trainer makes another model then (``model_init``), or was given the
            callback after its optimizer was made.

    Example:
        >>> TreatmentCallback("vit.embeddings.patch_embeddings.projection", "nog")
        TreatmentCallback(layer='vit.embeddings.patch_embeddings.projection', spec='nog')
    """

    _handle: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """Treat the layer, before the trainer makes its optimizer."""
        self._go_first()
        if model is not None:
            self.treat(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Attach the treatment, and take over its state from the checkpoint that the optimizer was loaded from."""
        if self.treatment is None or self.model is not model:
            raise ArgumentError(
                "TreatmentCallback has not treated the model that is trained: it was added after the trainer was made, "
                "or the trainer made a new model (model_init); pass the model itself, and the callback in "
                "Trainer(model, ..., callbacks=[...])."
            )
        self._release()
        plain = getattr(optimizer, "optimizer", optimizer)  # the one inside Accelerate's
        key = f"orthocond/{self.layer}"
        for group in plain.param_groups:
            if (saved := group.pop(key, None)) is not None:
                self.treatment.load_state_dict(saved)
        self.treatment.attach(optimizer, penalty=True)

        def save(_: Any, state_dict: dict[str, Any]) -> None:
            # A key of a parameter group is what an optimizer's state can carry besides its own: loading keeps it.
            assert self.treatment is not None
            state_dict["param_groups"][0][key] = self.treatment.state_dict()

        self._handle = plain.register_state_dict_post_hook(save)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Detach the treatment; the weight stays as it is, and a second ``train()`` attaches it again."""
        self._release()

    def _release(self) -> None:
        if self.treatment is not None:
            self.treatment.detach()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class ConditionCallback(Watching, _LoggingCallback):
    """Logs rank and condition numbers of the model's meta-layers, as ``condition/<layer>/<number>``.

    The newest record is logged with the training loss, every ``logging_steps`` steps.

    Args:
        every: record every ``every``-th training forward of each layer.
        layers: dotted names of further layers whose input is watched.
        rtol: the cut for rank and ``cond_support``, as in `ConditionMonitor`.

    Example:
        >>> ConditionCallback(layers=["classifier"], every=10)
        ConditionCallback(every=10, layers=['classifier'], rtol=None)
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """Begin to watch, in the process that logs."""
        self._go_first()
        self.stop()  # a training that was interrupted
        if state.is_world_process_zero:
            self.watch(model)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop watching."""
        self.stop()
