"""Artefacts of a run besides its database: summary, models, similarities and plots."""

from __future__ import annotations

import json
import logging
import os
import runpy
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from raceme import datasets
from raceme.core.config import CONFIG, RunConfig, check_trusted, expanded, imported_by, read_toml
from raceme.core.errors import UserError, check_known, one_line, os_errors_as_user_errors
from raceme.core.files import atomic_write
from raceme.core.registry import EXPORT, explained
from raceme.records.folder import SIMILARITY, SUMMARY, clusters_in, model_file, read_model, saved_in
from raceme.records.record import RunRecord, read_run
from raceme.records.similarity import Similarity
from raceme.records.summary import write_summary
from raceme.records.versions import Arrays, VersionStore
from raceme.reporting.plots import (
    accuracy_figure,
    clusters_figure,
    devices_figure,
    has_scores,
    measure_figure,
    mixtures_figure,
    similarity_figure,
    tasks_figure,
    uploads_figure,
    why_no_mixtures,
)
from raceme.reporting.style import CLOCK, save_figure

if TYPE_CHECKING:
    from raceme.datasets.source import Dataset
    from raceme.training.models import DeployedNetwork

log = logging.getLogger("raceme")

Similarities = tuple[list[str], NDArray[np.floating]]


def write_all(
    out: Path,
    *,
    summary: Mapping[str, Any],
    models: Mapping[int, Arrays],
    clients: Iterable[tuple[str, Arrays]] = (),
    similarity: Similarities | None = None,
    target: float | None = None,
    clock: str = CLOCK,
) -> dict[str, str]:
    """Write a run's artefacts beside its database; log failures, which do not affect the others.

    Parameters
    ----------
    out : Path
        The run's folder, with its ``run.sqlite``.
    summary : Mapping
        Numbers of the run, written as ``summary.json``.
    models : Mapping[int, Arrays]
        Cluster to its model's arrays by name.
    clients : Iterable
        Clients, each with the arrays of the model that it uses; iterated once.
    similarity : tuple, optional
        Client ids and the matrix of their similarities. For large fleets a part is stored and
        drawn.
    target : float, optional
        Target accuracy, for the plot.
    clock : str
        Label of the time axes.

    Returns
    -------
    dict[str, str]
        Artefacts that could not be written, with reasons.
    """
    failed = _attempt(SUMMARY, write_summary, out / SUMMARY, summary)
    for cluster, arrays in models.items():
        path = model_file(out, cluster)
        note = f"cluster {cluster} of {summary['strategy']} on {summary['dataset']}"
        failed |= _attempt(f"{path.parent.name}/{path.name}", save_model, path, arrays, note)
    failed |= _attempt("clients/", _save_client_models, out, clients, summary)
    kept = None if similarity is None else Similarity.thinned(*similarity)
    if kept is not None:
        failed |= _attempt(SIMILARITY, kept.save, out)
    try:
        record = read_run(out)
    except UserError as error:
        return failed | {"plots": str(error)}
    title = f"{summary['strategy']} on {summary['dataset']}, seed {summary['seed']}"
    figures = figures_of(record, similarity=kept, target=target, title=title, clock=clock)
    if why := why_no_mixtures(record):
        log.warning("mixtures.png is left out: %s", why)
    for name, draw in figures.items():
        path = out / f"{name}.png"
        failed |= _attempt(path.name, _draw, draw, path)
    return failed


def figures_of(
    record: RunRecord,
    *,
    similarity: Similarity | None,
    target: float | None = None,
    title: str = "",
    clock: str = CLOCK,
) -> dict[str, Callable[[], Figure]]:
    """Return the functions that draw the figures of a run, by file name.

    Optional figures without content are left out. The parameters are those of
    :func:`raceme.reporting.plots.accuracy_figure`.
    """
    figures: dict[str, Callable[[], Figure]] = {
        "accuracy": partial(accuracy_figure, record, target=target, title=title, clock=clock),
        "clusters": partial(clusters_figure, record, clock=clock),
        "devices": partial(devices_figure, record, clock=clock),
    }
    if similarity is not None and similarity.clients:
        figures["similarity"] = partial(draw_similarity, record, similarity)
    for name, draw, has_data in (
        ("uploads", uploads_figure, has_scores(record)),
        ("mixtures", mixtures_figure, bool(record.summary.uploads.divergences())),
        ("tasks", tasks_figure, bool(record.summary.tasks.count)),
    ):
        if has_data:
            figures[name] = partial(draw, record)
    for schema in record.drawn_measures:
        figures[schema.file] = partial(measure_figure, record, schema, clock=clock)
    return figures


def _save_client_models(
    out: Path, clients: Iterable[tuple[str, Arrays]], summary: Mapping[str, Any]
) -> None:
    for client, arrays in clients:
        note = f"{client} of {summary['strategy']} on {summary['dataset']}"
        save_model(model_file(out, client), arrays, note)


def save_model(path: Path, arrays: Arrays, description: str) -> None:
    """Write a model as safetensors, atomically, with a description in its header.

    The same model gives the same bytes; the header therefore has a single entry, as safetensors
    writes several in any order.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    with atomic_write(path) as file:
        save_file(plain, file, metadata={"description": description})


def draw_similarity(record: RunRecord, similarity: Similarity | None) -> Figure:
    """Draw the similarities of a run's clients, if known."""
    if similarity is None:
        similarity = Similarity((), np.empty((0, 0), np.float32), 0)
    return similarity_figure(
        similarity.clients, similarity.matrix, record.assignment(), of=similarity.of
    )


def _draw(draw: Callable[[], Figure], path: Path) -> None:
    save_figure(draw(), path)


def _attempt(name: str, write: Callable[..., None], *arguments: Any) -> dict[str, str]:
    """Write one artefact; if that fails, log it and return its name and the reason."""
    try:
        write(*arguments)
    except Exception as error:
        reason = getattr(error, "strerror", None) or one_line(error) or type(error).__name__
        if isinstance(error, OSError | SafetensorError):
            # E.g. a full disk, for which a traceback is no help.
            log.error("%s could not be written: %s", name, reason)
        else:
            log.exception("%s could not be written", name)
        return {name: reason}
    return {}


def missing_line(out: Path, unwritten: Mapping[str, str]) -> str:
    """Return a line with the artefacts that could not be written, the reasons, and those saved."""
    reasons = dict.fromkeys(unwritten.values())
    saved = ", ".join(saved_in(out)) or "nothing"
    return (
        f"{', '.join(unwritten)} could not be written ({'; '.join(reasons)}). Saved in {out}: "
        f"{saved}."
    )


# -----------------------------------------------------------------------------
# Export of a model for use without Raceme, with a program that uses it.
# -----------------------------------------------------------------------------


_SAMPLES = 100
"""Number of inputs on which an exported model is compared with the run's."""
_TOLERANCE = 1e-4
"""Largest difference of an output, relative to the largest output, but at least to 1."""
_TEMPLATE = Path(__file__).parent / "templates" / "predict.txt"


def export_model(
    run: Path,
    kind: str = "safetensors",
    *,
    cluster: int | None = None,
    device: str | None = None,
    labels: Sequence[str] = (),
    out: Path | None = None,
    trust: str = "",
) -> tuple[Path, str]:
    """Write a model of a run with `model.json` and `predict.py`, and compare it with the run's.

    Parameters
    ----------
    run : Path
        Folder of the run.
    kind : str
        ``safetensors`` or ``onnx``.
    cluster, device : int or str, optional
        The cluster or device whose model is exported; one is required unless the run has one
        cluster.
    labels : Sequence[str]
        Names of the classes; by default those of the dataset, or numbers.
    out : Path, optional
        New folder; by default ``export/<model>-<format>`` in the run's folder.
    trust : str
        Folder whose runs may name code that is imported, such as a user's own model.

    Returns
    -------
    tuple[Path, str]
        The folder, and the result of the comparison.

    Raises
    ------
    UserError
        There is no such model or format, the folder exists, a package is missing, the run names
        code that is not trusted, or the network cannot be exported.
    """
    check_known("format", kind, _WRITERS)
    for package in EXPORT if kind == "onnx" else ():
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            raise explained(error) from None
    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is not the folder of a run.")
    config, strategy = _config_of_model(run, trust)
    name, arrays, about = _chosen(run, cluster, device)
    out = run / "export" / f"{name}-{kind}" if out is None else out
    if out.exists():
        raise UserError(f"{out} exists already and is kept: choose another folder with --out.")
    from raceme.training.models import deployed_network, description_of

    data = datasets.described(config)
    network = deployed_network(config, data, arrays)
    stated = _stated_labels(data, labels)
    with os_errors_as_user_errors(f"Cannot write to {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        partial_ = Path(tempfile.mkdtemp(prefix=f".{out.name}-", suffix=".partial", dir=out.parent))
        try:
            about |= description_of(config, data, stated, kind)
            about["run"]["strategy"] = strategy
            (partial_ / "model.json").write_text(json.dumps(about, indent=2) + "\n")
            imports, own = _written(kind, network, data, partial_)
            program = _TEMPLATE.read_text(encoding="utf-8")
            program = program.replace("@IMPORTS@", imports).replace("@NETWORK@", own.strip("\n"))
            (partial_ / "predict.py").write_text(program, encoding="utf-8")
            difference = _difference(partial_, network, data)
            partial_.chmod(0o755)
            os.replace(partial_, out)
        finally:
            shutil.rmtree(partial_, ignore_errors=True)
    return out, f"{_SAMPLES} samples, largest difference of an output {difference:.1g}"


_NEEDED = ("dataset", "model")
"""Keys whose code an export needs."""


def _config_of_model(run: Path, trust: str) -> tuple[RunConfig, str]:
    """Return the configuration of a run's model and inputs, and the name of its strategy.

    No other code that the run names is imported.

    Raises
    ------
    UserError
        The run names such code, and is not trusted.
    """
    keys = read_toml(run / CONFIG)
    code = imported_by(keys)
    needed = [(key, code[key]) for key in _NEEDED if key in code]
    check_trusted(run / CONFIG, needed, trust, run)
    others = code.keys() - set(_NEEDED)
    # Keys of code that is not needed are left out, as reading them would import it.
    kept = {name: value for name, value in expanded(keys).items() if name not in others}
    config = RunConfig.from_mapping(kept, lenient=bool(others))
    return config, code.get("strategy", config.strategy)


def _chosen(
    run: Path, cluster: int | None, device: str | None
) -> tuple[str, Arrays, dict[str, Any]]:
    """Return the name of a model in the run's folder, its arrays, and its cluster or device.

    If the run stores versions, it is the version in use.
    """
    if cluster is not None and device is not None:
        raise UserError("--cluster and --device each name a model: give one of them.")
    record, store = read_run(run), VersionStore(run)
    versions = {k: used for k in store.clusters if (used := store.in_use(k)) is not None}
    numbers = sorted(versions) or clusters_in(run)
    if not numbers:
        raise UserError(
            f"{run} has no models: a run writes them at its end, or stores versions while it is "
            f"served."
        )
    about: dict[str, Any] = {"updates": len(record.updates.seq)}
    name = ""
    if device is not None:
        known = {client.client for client in record.clients}
        check_known("device", device, known)
        about["device"] = device
        own = model_file(run, device)
        name = f"device-{own.stem}"
        if own.is_file() and not versions:
            return name, read_model(own), about
        weights = record.memberships().get(device) or {}
        if len(weights) != 1 and not versions:
            raise UserError(
                f"No single cluster serves {device}: resume the run with --set client-models=true, "
                f"which writes each device's own model."
            )
        cluster = record.assignment().get(device)
        if cluster is None:
            raise UserError(f"No cluster serves {device} yet: choose one with --cluster.")
    if cluster is None:
        if len(numbers) > 1:
            raise UserError(
                f"The run has the clusters {', '.join(map(str, numbers))}: choose one with "
                "--cluster, or a device with --device."
            )
        cluster = numbers[0]
    if cluster not in numbers:
        raise UserError(
            f"{_why_no_model(record, cluster)} There are {', '.join(map(str, numbers))}."
        )
    about["cluster"] = cluster
    name = name or f"cluster-{cluster}"
    if cluster not in versions:
        return name, read_model(model_file(run, cluster)), about
    about["version"] = versions[cluster].number
    try:
        return name, store.load(versions[cluster], device or ""), about
    except (OSError, SafetensorError) as error:
        # The version has been replaced meanwhile.
        raise UserError(f"{versions[cluster].file} cannot be read: {error}. Try again.") from None


def _why_no_model(record: RunRecord, cluster: int) -> str:
    """Return an explanation for a cluster without a model."""
    for event in record.changes:
        if cluster in event.gone:
            made = ", ".join(map(str, event.made)) or "none"
            return f"Cluster {cluster} is gone ({event.change.value}; its successors: {made})."
    return f"There is no cluster {cluster}."


def _stated_labels(data: Dataset, labels: Sequence[str]) -> list[str] | None:
    """Return the names of the classes; None for a regression."""
    if data.target is not None:
        if labels:
            raise UserError("--labels names classes, and the run predicts a quantity.")
        return None
    if labels and len(labels) != data.num_classes:
        raise UserError(f"--labels has {len(labels)} names, and there are {data.num_classes}.")
    return list(labels or data.labels or map(str, range(data.num_classes)))


def _written(kind: str, network: DeployedNetwork, data: Dataset, folder: Path) -> tuple[str, str]:
    """Write a network in a format; return the imports and the functions of its `predict.py`."""
    try:
        return _WRITERS[kind](network, data, folder)
    except (OSError, UserError):
        raise
    # Torch's exporters raise various errors for networks that they cannot trace.
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"The network cannot be exported as {kind} ({lines[0][:200]}): load its weights, in "
            "the run's folders clusters and clients, into its class."
        ) from error


def _onnx(network: DeployedNetwork, data: Dataset, folder: Path) -> tuple[str, str]:
    import torch

    from raceme.training.models import raw_inputs

    example = (torch.from_numpy(raw_inputs(data, 2)),)
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                network,
                example,
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("n")},),
                input_names=["inputs"],
                output_names=["scores"],
                verbose=False,
            )
        assert program is not None
        # One file, up to the limit of 2 GiB of protocol buffers.
        program.save(folder / "model.onnx", external_data=False)
    finally:
        logger.setLevel(before)
    return (
        "import numpy as np\nimport onnxruntime",
        """
SESSION = onnxruntime.InferenceSession(
    str(HERE / "model.onnx"), providers=["CPUExecutionProvider"]
)


def as_batch(inputs):
    x = np.asarray(inputs, dtype=MODEL["input"]["type"])
    return x[None] if x.ndim == len(SHAPE) else x


def scores(x):
    return SESSION.run(None, {"inputs": x})[0]
""",
    )


def _safetensors(network: DeployedNetwork, data: Dataset, folder: Path) -> tuple[str, str]:
    """Write the weights, and the network as a function of torch's operators."""
    import torch
    from torch.export.graph_signature import InputKind

    from raceme.training.models import raw_inputs

    example = (torch.from_numpy(raw_inputs(data, 2)),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = ({0: torch.export.Dim("n")},)
        program = torch.export.export(network, example, dynamic_shapes=shapes)
    inputs = program.graph_signature.input_specs
    names = [str(spec.target) for spec in inputs if spec.kind is not InputKind.USER_INPUT]
    held: dict[str, Any] = {**program.state_dict, **program.constants}
    arrays = {name: held[name].detach().numpy() for name in names}
    save_model(folder / "model.safetensors", arrays, "weights of the network in predict.py")
    code = program.graph_module.code.strip().replace("def forward(self, ", "def network(", 1)
    listed = "".join(f'    "{name}",\n' for name in names)
    return (
        "import torch\nfrom math import inf, nan\nfrom safetensors.torch import load_file\n"
        "from torch import device",
        f"""
WEIGHTS = load_file(HERE / "model.safetensors")
ORDER = (
{listed})


def as_batch(inputs):
    x = torch.as_tensor(inputs, dtype=getattr(torch, MODEL["input"]["type"]))
    return x[None] if x.ndim == len(SHAPE) else x


def scores(x):
    with torch.inference_mode():
        return network(*[WEIGHTS[name] for name in ORDER], x)[0]


{code}
""",
    )


_WRITERS: Mapping[str, Callable[[DeployedNetwork, Dataset, Path], tuple[str, str]]] = {
    "safetensors": _safetensors,
    "onnx": _onnx,
}


def _difference(folder: Path, network: DeployedNetwork, data: Dataset) -> float:
    """Return the difference of `predict.py` from the run's network, with inputs as in training.

    Raises
    ------
    UserError
        The difference exceeds rounding.
    """
    import torch

    from raceme.training.models import raw_inputs

    raw = raw_inputs(data, _SAMPLES)
    inputs = replace(data, x=raw).inputs(np.arange(_SAMPLES))
    with torch.inference_mode():
        outputs = network.network(torch.from_numpy(inputs)).numpy()
    if data.target is not None:
        outputs = outputs * data.target.std + data.target.mean
    program = runpy.run_path(str(folder / "predict.py"))
    found = np.asarray(program["scores"](program["as_batch"](raw)))
    # A single input, as an application would send it.
    alone = np.asarray(program["scores"](program["as_batch"](raw[0])))
    difference = float(max(np.abs(found - outputs).max(), np.abs(alone - outputs[:1]).max()))
    if not difference <= _TOLERANCE * max(1.0, float(np.abs(outputs).max())):
        raise UserError(
            f"The exported model differs from the run's by {difference:.2g}: nothing was written. "
            "Try another --format."
        )
    return difference
