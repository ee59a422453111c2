"""The configuration of a run: every setting, its sources, and its validation."""

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthocond.errors import ArgumentError, check_choice
from orthocond.lab.methods import method
from orthocond.lab.models import MODELS
from orthocond.linalg import GRADIENTS, SOLVERS
from orthocond.nn import CovariancePool2d
from orthocond.treatments import TREATMENTS, canonical, parse, parsed_choice, split_outside

__all__ = [
    "OPTIMIZERS",
    "PLACE",
    "PRECISIONS",
    "SCHEDULES",
    "Config",
    "changed",
    "check_effect",
    "difference",
    "flags",
    "from_json",
    "from_settings",
    "from_toml",
    "parsed",
    "solver_of",
]

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
WATCHED = {
    "layer": "that of the meta-layer, at no cost",
    "input": "computed again in float64, as cond_floor needs it",
    "none": "none",
}
OPTIMIZERS = {"sgd": "SGD with momentum", "adamw": "AdamW"}
SCHEDULES = {
    "steps": "multiplied by gamma after each milestone, an epoch",
    "linear": "falls to a hundredth over the run, linearly",
}


def _setting(default: Any, about: str, *, place: bool = False) -> Any:
    """Return a field; ``place`` says that it is about where a run happens, so a resumed run may change it."""
    return dataclasses.field(default=default, metadata={"help": about, "place": place})


@dataclass(frozen=True)
class Config:
    """Every setting of a run.

    Raises:
        ArgumentError: an invalid value.

    Example:
        >>> config = Config("mine", method="svd+ow+nog", epochs=3)
        >>> config.method, config.batch_size
        ('svd+nog+ow', 128)
    """

    preset: str
    method: str = _setting("svd", "svd, newton_schulz or products, alone or with treatments (svd+nog+ow+olr); or bn")
    seed: int = _setting(0, "seed of initial weights, data order and augmentation")

    dataset: str = _setting("digits", "digits (embedded), or the name of an image dataset on the Hugging Face hub")
    data: str | None = _setting(
        None, "folder with a local copy: parquet files, or train/ and val/ image folders", place=True
    )
    num_classes: int = _setting(10, "number of classes")
    pad: int = _setting(4, "padding of the random crop of images in memory")
    flip: bool = _setting(True, "flip half of the training images")
    resize: int | None = _setting(None, "resize images to this square and stream them from disk")
    crop: int = _setting(224, "random crop (centre crop for validation) of resized images")

    model: str = _setting("resnet18", f"one of {', '.join(MODELS)}")
    meta: str = _setting("dbn", "position of the meta-layer: dbn (first layer) or gcp (head)")
    small_images: bool = _setting(True, "3x3 stem with stride 1 and no pooling, instead of ImageNet's")
    width: int = _setting(64, "channels of the stem")
    reduction: int | None = _setting(None, "channels of a 1x1 convolution in front of the head")
    eps: float | None = _setting(
        None, "number added to the eigenvalues of the covariance, or with clamp=true their floor; default: the layer's"
    )
    last_stride: int = _setting(2, "stride of the last stage of a residual network; 1: four times as many places")
    rtol: float | None = _setting(None, "eigenvalues below rtol times the largest are dropped; default: the layer's")
    channels_last: bool = _setting(False, "use the channels-last layout, in which convolutions are faster")
    solver: str | None = _setting(
        None,
        "solver of the root, with options: eigh or svd for methods svd, newton_schulz(iterations=5), products; several "
        "separated by commas",
    )
    gradient: str = _setting("exact", f"gradient rule of the root: {', '.join(GRADIENTS)}; or e.g. pade(clamp=true)")

    parts: str = _setting(
        "none", "treatment options that the method does not give itself, e.g. ow(kind=operator)+olr(rule=exact)"
    )

    epochs: int = _setting(1, "passes over the training images")
    steps: int | None = _setting(None, "stop after this many steps, whatever the number of epochs")
    batch_size: int = _setting(128, "images in a step, over all devices")
    optimizer: str = _setting("sgd", f"one of {', '.join(OPTIMIZERS)}")
    learning_rate: float = _setting(0.1, "initial learning rate; for adamw about 0.001")
    pre_svd_rate: float | None = _setting(
        None, "initial learning rate of the layer in front of the meta-layer; default: that of the others"
    )
    momentum: float = _setting(0.9, "momentum of SGD, or the first beta of AdamW")
    weight_decay: float = _setting(5e-4, "weight decay")
    schedule: str = _setting("steps", f"learning-rate schedule: {', '.join(SCHEDULES)}")
    milestones: tuple[int, ...] = _setting((), "epochs after which the learning rate is multiplied by gamma: 30,45")
    gamma: float = _setting(0.1, "factor of the learning rate at a milestone")

    precision: str = _setting("32-true", ", ".join(PRECISIONS))
    accelerator: str = _setting("auto", "auto, cpu, cuda or mps", place=True)
    devices: str = _setting("1", "number of devices, or auto", place=True)
    nodes: int = _setting(1, "number of machines", place=True)
    workers: int = _setting(2, "processes that read and decode streamed images", place=True)
    prefetch: int = _setting(2, "batches that each worker reads ahead", place=True)
    cudnn_benchmark: bool = _setting(
        False, "let cuDNN try its algorithms and keep the fastest; runs are no longer the same bit for bit", place=True
    )
    threads: int | None = _setting(None, "threads per process; default: PyTorch's choice", place=True)
    checkpoint_every: int = _setting(500, "steps between checkpoints; each epoch ends with one too", place=True)
    val_images: int | None = _setting(None, "validate with this many images only, evenly spaced")
    evaluate_every: int = _setting(1, "epochs between validations; the last epoch is always validated")
    monitor: str = _setting("layer", "covariance that is watched: " + "; ".join(map(": ".join, WATCHED.items())))
    monitor_every: int = _setting(1, "steps between two records of the condition number")
    monitor_exact: int | None = _setting(
        None, "steps between exact condition numbers of products, which only estimates them; default: estimates alone"
    )
    monitor_validation: bool = _setting(False, "also record condition numbers in validation")

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", canonical(self.parts))
        object.__setattr__(self, "method", method(self.method, self.parts).name)
        for name, choices in (
            ("model", MODELS),
            ("meta", ("dbn", "gcp")),
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("precision", PRECISIONS),
            ("accelerator", ("auto", "cpu", "cuda", "mps")),
            ("monitor", WATCHED),
        ):
            check_choice(getattr(self, name), choices, name, "the run")
        CovariancePool2d(gradient=self.gradient)  # says what is wrong with it
        solver_of(self)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise ArgumentError(f"{name} must be at least {least}, got {value}.")
        if self.optimizer == "adamw" and self.momentum >= 1:
            raise ArgumentError(f"momentum is the first beta of adamw and must be below 1, got {self.momentum}.")
        if self.seed >= 2**63:
            raise ArgumentError(f"seed must be below 2^63, got {self.seed}.")
        if self.devices != "auto" and not (self.devices.isdecimal() and int(self.devices) > 0):
            raise ArgumentError(f"devices must be a number or auto, got {self.devices!r}.")
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones, default=1) < 1:
            raise ArgumentError(f"milestones must be epochs in ascending order, got {self.milestones}.")

    @property
    def can_be_gauged(self) -> bool:
        """Whether the meta-layer's output is the same for every gauge: whitening without eps."""
        return self.meta == "dbn" and not self.eps

    def to_json(self) -> str:
        """Return the configuration as text, a line for each setting."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def check_effect(given: Mapping[str, Any], config: Config, methods: Iterable[str]) -> None:
    """Check that each of the given settings has an effect on a run with one of the methods.

    Raises:
        ArgumentError: exact condition numbers are wanted where nothing is estimated or watched, a learning rate for a
            layer that no network has, or ``parts`` names a treatment without options that no method has.
    """
    methods = list(methods)
    solvers = {method(name, config.parts).solver for name in methods}
    if "parts" in given:
        used = {part.name for name in methods for part in parse(method(name, config.parts).treatment)}
        pieces = [parsed_choice(piece.lower()) for piece in split_outside(given["parts"], "+") if piece]
        unused = [name for name, options in pieces if not options and name not in {*used, "none"}]
        if unused:  # as written: ow(kind=kernel) may override a preset's ow(kind=operator)
            raise ArgumentError(
                f"parts sets options of treatments that methods name, and no method names {' or '.join(unused)}; to "
                f"apply the treatment, write it into the method, e.g. svd+{'+'.join(unused)}."
            )
    if "monitor_exact" in given and config.monitor == "none":
        raise ArgumentError("monitor_exact has no effect with monitor=none, which watches nothing; leave one out.")
    if "monitor_exact" in given and "products" not in solvers:
        raise ArgumentError("monitor_exact is for methods with products; the others are exact anyway, leave it out.")
    if "pre_svd_rate" in given and solvers == {None}:
        raise ArgumentError("pre_svd_rate is for the layer in front of the meta-layer, and bn has none; leave it out.")


PLACE = frozenset(field.name for field in dataclasses.fields(Config) if field.metadata.get("place"))
"""The settings that are about where a run happens: a resumed run may change them."""

_LEAST = {
    **dict.fromkeys(("pad", "workers", "seed"), 0),
    **dict.fromkeys(("eps", "rtol", "learning_rate", "pre_svd_rate", "momentum", "weight_decay", "gamma"), 0.0),
    **dict.fromkeys(("resize", "crop", "width", "reduction", "epochs", "steps", "batch_size", "nodes", "threads"), 1),
    **dict.fromkeys(("val_images", "checkpoint_every", "evaluate_every", "prefetch"), 1),
    **dict.fromkeys(("monitor_every", "monitor_exact"), 1),
    "last_stride": 1,
    "num_classes": 2,
}
_TYPES = typing.get_type_hints(Config)


def solver_of(config: Config) -> str | None:
    """Return the solver of the meta-layer's root, with its options; None where there is no meta-layer.

    The configuration may name several solvers; the one that fits the method is used: ``newton_schulz`` and
    ``products`` for methods of that name, any solver with eigenvalues for methods that begin with ``svd``.

    Raises:
        ArgumentError: an unknown solver or option, one that no method of a sweep uses, or ``clamp=true`` without an
            ``eps``.

    Example:
        >>> solver_of(Config("mine", solver="svd,newton_schulz(iterations=7)", method="newton_schulz"))
        'newton_schulz(iterations=7)'
        >>> solver_of(Config("mine", solver="svd", method="newton_schulz"))
        'newton_schulz'
        >>> solver_of(Config("mine", method="svd(eps=1e-2, clamp=true)"))
        'eigh(clamp=true)'
    """
    chosen = method(config.method, config.parts)
    default = chosen.solver
    try:
        names = [] if config.solver is None else split_outside(config.solver, ",")
    except ValueError as error:
        raise ArgumentError(f"the setting solver has {config.solver!r} {error}.") from None
    found = {}
    for name in names:
        base = name.partition("(")[0].strip()
        check_choice(base, SOLVERS, "solver", "the run")
        CovariancePool2d(solver=name)  # says what is wrong with its options
        fits = "svd" if SOLVERS[base].has_eigenvalues else base
        if fits not in ("svd", "newton_schulz", "products") or fits in found:
            raise ArgumentError(
                f"solver must name one for svd (eigh, svd), newton_schulz, products, or several of these, got "
                f"{config.solver!r}; separate them by commas."
            )
        found[fits] = name
    if default is None:
        return None
    solver = found.get("svd" if default == "eigh" else default, default)
    if chosen.clamp:
        base, options = parsed_choice(solver)
        options["clamp"] = "true"
        solver = f"{base}({', '.join(f'{option}={value}' for option, value in options.items())})"
    if CovariancePool2d(solver=solver).clamp and not chosen.options.get("eps", config.eps):
        raise ArgumentError(
            f"{config.method!r} with the solver {solver} has no eps to raise eigenvalues to; give one, e.g. --eps 1e-2."
        )
    return solver


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the configuration with some settings replaced.

    Raises:
        ArgumentError: a setting that does not exist, or a value of the wrong kind.

    Example:
        >>> changed(Config("mine"), {"learning_rate": "0.05", "milestones": [10, 20]}).milestones
        (10, 20)
    """
    fields = [field.name for field in dataclasses.fields(Config) if field.name != "preset"]
    for name in settings:
        if name in _PART_OF:
            part = TREATMENTS[_PART_OF[name]]
            raise ArgumentError(
                f"the setting {name} is an option of {part.name} now; write it into the method, e.g. "
                f"svd+{part.name}({name}={settings[name]})."
            )
        check_choice(name, fields, "setting", "the configuration")
    return dataclasses.replace(config, **{name: parsed(name, value) for name, value in settings.items()})


def from_toml(file: Path) -> dict[str, Any]:
    """Return the settings of a TOML file.

    Raises:
        ArgumentError: it can't be read, or is not valid TOML.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"can't read the configuration {file}: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"{file} is not valid TOML: {error}.") from None


def from_json(text: str) -> Config:
    """Return the configuration that `Config.to_json` wrote.

    Raises:
        ArgumentError: it is damaged, or from another version of orthocond.
    """
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        raise ArgumentError("the configuration is damaged: it is not valid JSON; restore it from a copy.") from None
    return from_settings(settings)


def from_settings(settings: Any) -> Config:
    """Return the configuration with these settings, as `dataclasses.asdict` returns them.

    Raises:
        ArgumentError: these are not settings, or they are from another version of orthocond.
    """
    if not isinstance(settings, dict) or not isinstance(settings.get("preset"), str):
        raise ArgumentError("the configuration is damaged: it names no preset; restore it from a copy.")
    return changed(Config(settings["preset"]), _with_parts(settings))


_PART_OF = {
    "kind": "ow",
    "normalize": "ow",
    "penalty_weight": "ol",
    "rule": "olr",
    "threshold": "gauge",
    "metric": "gauge",
}
"""Settings of version 0.1 that are options of a part now."""


def _with_parts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, apart from the preset, with those of version 0.1 as options of their parts."""
    own = {name: value for name, value in settings.items() if name != "preset"}
    options: dict[str, dict[str, Any]] = {}
    for name in [name for name in own if name in _PART_OF]:
        options.setdefault(_PART_OF[name], {})[name] = own.pop(name)
    if options:
        made = [TREATMENTS[part](**values) for part, values in options.items()]
        own["parts"] = "+".join(repr(part) for part in made if repr(part) != part.name) or "none"
    return own


def difference(stored: Config, config: Config) -> str | None:
    """Return how a run's configuration differs from another, apart from where it happens; None if it doesn't.

    Example:
        >>> difference(Config("mine", epochs=3, threads=2), Config("mine", epochs=5))
        'epochs 3, not 5'
    """
    for field in dataclasses.fields(Config):
        before, now = getattr(stored, field.name), getattr(config, field.name)
        if before != now and field.name not in PLACE:
            return f"{field.name} {before}, not {now}"
    return None


def flags(config: Config, base: Config) -> list[str]:
    """Return the command line's flags that turn ``base`` into ``config``, apart from where it happens.

    Example:
        >>> flags(Config("mine", epochs=3, flip=False, milestones=(1, 2)), Config("mine"))
        ['--flip', 'false', '--epochs', '3', '--milestones', '1,2']
    """
    words = []
    for field in dataclasses.fields(Config):
        value = getattr(config, field.name)
        if value == getattr(base, field.name) or field.name == "preset" or field.name in PLACE - {"data"}:
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{field.name.replace('_', '-')}", text.lower() if value in (None, True, False) else text]
    return words


def parsed(name: str, value: Any) -> Any:
    """Return a setting's value from its text in a file or on the command line.

    Raises:
        ArgumentError: a value of the wrong kind.

    Example:
        >>> parsed("milestones", "30,45"), parsed("learning_rate", 1), parsed("rtol", "none")
        ((30, 45), 1.0, None)
    """
    kind = _TYPES[name]
    optional = isinstance(kind, types.UnionType)
    if optional:
        if value is None or value == "none":
            return None
        (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
    try:
        if kind == tuple[int, ...]:
            parts = [part for part in (value.split(",") if isinstance(value, str) else value) if part != ""]
            if any(isinstance(part, float) for part in parts):
                raise ValueError
            return tuple(int(part) for part in parts)
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if kind is str and isinstance(value, str | int):
            return str(value)
        number = kind(value)
        if kind is str or isinstance(value, bool) or (kind is int and number != float(value)):
            raise ValueError
        return number
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        what = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(kind, "e.g. 30,45")
        raise ArgumentError(f"the setting {name} takes {what}, got {value!r}.") from None
