"""Registries of names and their objects.

Each kind of thing that a run can choose (a strategy, a dataset, a partition, ...) has one
`Registry`: a table of Raceme's own names, the entry points of installed packages, and any
``module:attribute`` that can be imported. This module imports none of the objects. Looking one up
imports the module that defines it and what that module imports, and nothing else; listing names,
their summaries and the nearest match of a mistyped name imports no module at all.
"""

from __future__ import annotations

import ast
import os
import pickle
import re
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dis import get_instructions
from functools import cache, cached_property
from hashlib import sha256
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from raceme.core.errors import UserError, unknown_name
from raceme.core.installation import install_line

# -----------------------------------------------------------------------------
# Optional packages of hosts (the extra ``server``), and errors without them.
# -----------------------------------------------------------------------------


SERVER = {
    "PIL": "pillow",
    "cloudpickle": "cloudpickle",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "prometheus_client": "prometheus-client",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "segno": "segno",
    "sklearn": "scikit-learn",
    "threadpoolctl": "threadpoolctl",
    "torchvision": "torchvision",
}
"""Packages of the extra ``server`` as they are imported, and as they are installed."""

_USERS: set[str] = set()
"""Names of the imported modules with users' objects."""

EXPORT = ("onnx", "onnxruntime", "onnxscript")
"""Packages of the extra ``export``."""

PRIVACY = ("dp_accounting",)
"""Packages of the extra ``privacy``."""


def users_line(error: BaseException) -> str:
    """Return the last line of a user's module that an exception passed, or an empty text.

    For example ``"my_client.py, line 7"``.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__") in _USERS:
            file = frame.f_code.co_filename
            # In a worker process a definition of a script or notebook has no file.
            where = "the script or cell" if file.startswith("<") else Path(file).name
            return f"{where}, line {line}"
    return ""


def explained(error: Exception) -> Exception:
    """Return the exception for a failed import, or for one that a user's module raised.

    Returns
    -------
    Exception
        A `UserError` that names the command which installs the missing package, if it is one of the
        extras ``server``, ``export`` and ``privacy``, or the user's line; `error` itself for any
        other.
    """
    where = users_line(error)
    if where and not isinstance(error, UserError):
        return UserError(
            f"{_error_summary(error)} ({where}). Correct it there; if the "
            "run's folder has a file error.txt, it contains the traceback."
        )
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    for packages, extra in ((EXPORT, "export"), (PRIVACY, "privacy")):
        if name in packages:
            return UserError(f"{name} is not installed. Type: {install_line(extra)}")
    package = SERVER.get(name)
    if package is None:
        return error
    return UserError(
        f"{package} is not installed: this is an installation for a device. On a host "
        f"type: {install_line('server')}"
    )


def load(target: str) -> Any:
    """Import the object of a target, ``"module:attribute"``.

    Raises
    ------
    UserError
        A package of an extra is missing.
    """
    module, attribute = target.split(":")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise explained(error) from None


# -----------------------------------------------------------------------------
# Registries of names and their objects.
# -----------------------------------------------------------------------------


class Registry(Mapping[str, Any]):
    """A read-only map from names to objects, imported on first use.

    Iterating yields Raceme's own names and those of installed packages. ``module:attribute`` is
    accepted too and counts as contained; the look-up imports it.

    Parameters
    ----------
    kind : str
        Kind of objects for error messages, e.g. ``"strategy"``.
    targets : Mapping[str, str]
        Name to ``"module:attribute"``, or to the path of a TOML file in the package.
    group : str
        Installed packages register objects of this kind as entry points of this group.
    expected : str
        Expected object, for error messages; ``{name}`` is its attribute's name.
    fits : Callable
        Returns whether a user's object is of this kind.
    declares : str
        Attribute with the dataclass of the object's options.
    prefixed : bool
        Whether keys of options are prefixed with the object's name: ``casa.gamma``.
    own_options : bool
        Whether Raceme's own objects may have options. Without, they are not imported to ask.
    """

    def __init__(
        self,
        kind: str,
        targets: Mapping[str, str],
        *,
        group: str,
        expected: str,
        fits: Callable[[Any], bool] = callable,
        declares: str = "options_type",
        prefixed: bool = False,
        own_options: bool = True,
    ) -> None:
        self.kind, self.group, self.prefixed = kind, group, prefixed
        self._targets, self._expected = dict(targets), expected
        self._fits, self._declares, self._own_options = fits, declares, own_options

    def __getitem__(self, name: str) -> Any:
        """Return the object of a name.

        Raises
        ------
        UserError
            The name does not exist (the message has the nearest match), a user's object cannot be
            imported or is of another kind, or a package is missing.
        """
        own = self._targets.get(name)
        if own is None:
            return self._users_own(name)
        if own.endswith(".toml"):
            return (_PACKAGE / own).read_text(encoding="utf-8")
        return load(own)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._targets, *self._installed])

    def __len__(self) -> int:
        return len(self._targets) + len(self._installed)

    def __eq__(self, other: object) -> bool:
        # Compared by identity: a comparison as mappings would import all objects.
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (
            self.is_own(name) or ":" in name or name in self._installed
        )

    def is_own(self, name: str) -> bool:
        """Return whether a name is Raceme's own, not a user's or an installed package's."""
        return name in self._targets

    def module_of(self, name: str) -> str:
        """Return the module that defines an object of a user or an installed package.

        Empty for others: Raceme's own, files, and definitions of scripts and notebooks, which have
        a digest in their names.
        """
        target = self._installed[name].value if name in self._installed else name
        module, colon, _ = target.partition(":")
        package = __package__.partition(".")[0]
        is_theirs = colon and not module.startswith((_LOCAL, f"{package}."))
        return module if is_theirs else ""

    def check(self, name: str) -> None:
        """Check without importing that a name exists and is unique.

        Raises
        ------
        UserError
            The name does not exist, or is ambiguous.
        """
        # Read even for built-in names, which an installed package may claim too.
        names = [*self]
        if name not in self:
            raise unknown_name(self.kind, name, names, "raceme list")

    def name_of(self, chosen: str | Any) -> str:
        """Return the name of an object in configurations; names are unchanged.

        The names of a list are separated by commas. An object defined in a script, a notebook or a
        function is called ``main-DIGEST:Name``, and is pickled for the worker processes; see
        :func:`definitions`.

        Raises
        ------
        UserError
            The object is no class or function, has no name, or cannot be pickled.
        """
        if isinstance(chosen, str):
            return chosen
        if isinstance(chosen, list | tuple):
            return ",".join(map(self.name_of, chosen))
        for name, target in self._targets.items():
            module, _, attribute = target.partition(":")
            found = getattr(sys.modules.get(module), attribute, None)
            # `found` is None for a module that is not imported.
            if found is not None and found is chosen:
                return name
        attribute = getattr(chosen, "__qualname__", "")
        if not callable(chosen) or not attribute:
            raise UserError(
                f"{self.kind} must be a name of `raceme list`, module:{self._word}, or a "
                f"{self._word.lower()}; got an object of type {type(chosen).__name__}."
            )
        module = chosen.__module__
        if module == "__main__" or getattr(sys.modules.get(module), attribute, None) is not chosen:
            return _defined(self.kind, chosen)
        return f"{module}:{attribute}"

    def make(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call the object of a name, e.g. to make a strategy or build a model.

        Raises
        ------
        UserError
            There is no such object, or a user's object raises an exception.
        """
        found = self[name]
        if self.is_own(name):
            return found(*arguments, **named)
        try:
            return found(*arguments, **named)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.kind.capitalize()} '{name}' cannot be made: {_reason(error)}."
            ) from error

    def options_type(self, name: str) -> type[Any] | None:
        """Return the dataclass of the options of a name, if any.

        Raises
        ------
        UserError
            When no such name exists.
        """
        if not self._own_options and self.is_own(name):
            return None
        found: type[Any] | None = getattr(self[name], self._declares, None)
        return found

    def prefix(self, name: str) -> str:
        """Return the prefix of the option keys of a name."""
        return f"{self.short(name)}." if self.prefixed else ""

    def short(self, name: str) -> str:
        """Return a name without the module: latest-mean for ``my_methods:LatestMean``."""
        attribute = name.rpartition(":")[2]
        return kebab(attribute) if attribute != name else name

    def modules(self) -> dict[str, str]:
        """Return the modules of built-in objects, by Python name."""
        found = (target.split(":") for target in self._targets.values())
        return {attribute: module for module, attribute in found}

    def summaries(self) -> dict[str, str]:
        """Return the first line of each object's docstring by name, without importing."""
        targets = self._targets | {name: entry.value for name, entry in self._installed.items()}
        return {name: summary_of(target) for name, target in targets.items()}

    def installed(self) -> set[str]:
        """Return the objects registered by installed packages, as ``module:attribute``."""
        return {entry.value for entry in entry_points(group=self.group)}

    @cached_property
    def _installed(self) -> Mapping[str, EntryPoint]:
        """The entry points of installed packages, by name."""
        found: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self.group):
            package = "an installed package" if entry.dist is None else f"package {entry.dist.name}"
            where = f"{self.kind.capitalize()} '{entry.name}', an entry point of {package},"
            same = found.get(entry.name, entry).value == entry.value
            if not same or entry.name in self._targets:
                raise UserError(f"{where} has the name of another: give it one of its own.")
            if not _WORD.fullmatch(entry.name):
                raise UserError(f"{where} may have letters, digits and hyphens in its name only.")
            found[entry.name] = entry
        return found

    def _users_own(self, name: str) -> Any:
        """Import an object of a user or an installed package."""
        self.check(name)
        target = name if ":" in name else self._installed[name].value
        module, _, attribute = target.partition(":")
        expected = f"expected {self._expected.format(name=attribute or 'build')}"
        allow_local_imports()
        try:
            found: Any = _defined_as(target) if is_local(module) else import_module(module)
            _USERS.add(module)
        except (Exception, SystemExit) as error:
            few = len(self._targets) <= _FEW
            known = f"one of {', '.join(sorted(self._targets))}" if few else "one of `raceme list`"
            raise UserError(
                f"Cannot import '{module}' of {self.kind} '{name}': {_reason(error)}. "
                f"Expected {known}, or module:{self._word}."
            ) from error
        for part in attribute.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise UserError(
                f"Module '{module}' has no {self._word} '{attribute}' for {self.kind} '{name}': "
                f"{expected}."
            )
        if not self._fits(found):
            raise UserError(f"'{name}' is no {self.kind}: {expected}.")
        other = self.short(name)
        if self.prefixed and other != name and other in self and self._target(other) != target:
            raise UserError(
                f"The keys of '{name}' would be {other}.KEY, as those of the {self.kind} {other}: "
                "give the class another name."
            )
        return found

    def _target(self, name: str) -> str:
        return self._targets.get(name) or self._installed[name].value

    @property
    def _word(self) -> str:
        return "Class" if "subclass" in self._expected else "function"


# -----------------------------------------------------------------------------
# Classes and functions of scripts and notebooks, which other processes cannot import.
# -----------------------------------------------------------------------------


_LOCAL = "main-"
"""Prefix of the module in names of objects defined in a script, notebook or function."""
_local: dict[str, Any] = {}
_pickled: dict[str, bytes] = {}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_UNSAID = ("__dict__", "__doc__", "__firstlineno__", "__module__", "__weakref__")
"""Attributes of a class that do not affect its behaviour."""


def definitions() -> dict[str, bytes]:
    """Return the definitions for worker processes; see :func:`define`."""
    return dict(_pickled)


def define(pickled: Mapping[str, bytes]) -> None:
    """Add the definitions of the parent's script or notebook in a worker process."""
    _pickled.update(pickled)


def is_local(name: str) -> bool:
    """Return whether a name belongs to an object defined in a script or notebook."""
    return name.startswith(_LOCAL)


def _defined(kind: str, chosen: Any) -> str:
    """Keep an object and its pickle, and return its name, which depends on its code."""
    if not chosen.__name__.isidentifier():
        raise UserError(
            f"A lambda has no name to record the {kind} by: define a function, def NAME(...)."
        )
    name = f"{_LOCAL}{_digest(chosen)}:{chosen.__name__}"
    try:
        import cloudpickle

        _pickled[name] = cloudpickle.dumps(chosen)
    except ModuleNotFoundError as error:
        raise explained(error) from None
    except Exception as error:
        raise UserError(
            f"The {kind} {chosen.__name__} cannot be sent to worker processes: {_reason(error)}. "
            "Define it in a module of its own, and import it from there."
        ) from error
    _local[name] = chosen
    _USERS.add(chosen.__module__)
    return name


def _defined_as(name: str) -> ModuleType:
    """Return a module with only an object defined by a script or notebook."""
    attribute = name.rpartition(":")[2]
    if name not in _local:
        if name not in _pickled:
            raise ImportError(f"{attribute} is defined in a script or a notebook: run it there")
        _local[name] = pickle.loads(_pickled[name])
        _USERS.add(_local[name].__module__)
    module = ModuleType(_LOCAL)
    setattr(module, attribute, _local[name])
    return module


def _digest(chosen: Any) -> str:
    """Return a digest of a definition.

    It covers code, constants and used definitions of the same script, but neither positions nor
    imports, so that it is stable across sessions.
    """
    digest, seen = sha256(), set[int]()

    def add(part: Any, names: Mapping[str, Any]) -> None:
        part = getattr(part, "fget", None) or getattr(part, "__func__", part)
        own = getattr(part, "__module__", None) == chosen.__module__
        if isinstance(part, CodeType):
            digest.update(part.co_code)
            add([*part.co_consts, *part.co_names], names)
            # `co_names` also has names of attributes, which may coincide with names of globals.
            read = [at.argval for at in get_instructions(part) if at.opname == "LOAD_GLOBAL"]
            add([names[name] for name in read if name in names], {})
        elif isinstance(part, list | tuple):
            for each in part:
                add(each, names)
        elif isinstance(part, FunctionType | type) and own:
            if id(part) in seen:
                return
            seen.add(id(part))
            if isinstance(part, FunctionType):
                cells = [cell.cell_contents for cell in part.__closure__ or ()]
                add([part.__code__, part.__defaults__, part.__kwdefaults__], part.__globals__)
                add(cells, {})
            else:
                said = {name: of for name, of in vars(part).items() if name not in _UNSAID}
                add([part.__bases__, sorted(said), *said.values()], {})
        elif isinstance(part, FunctionType | type | ModuleType):
            digest.update(f"{getattr(part, '__module__', '')}.{part.__name__}".encode())
        else:
            shown = sorted(map(repr, part)) if isinstance(part, Set) else repr(part)
            digest.update(_ADDRESS.sub("", str(shown)).encode())

    add(chosen, {})
    return digest.hexdigest()[:12]


def source_digest(modules: Iterable[str]) -> str:
    """Return a digest of the source of users' modules, and of the neighbouring modules they use.

    A module in the same folder counts as used if its name occurs in the source.

    Returns
    -------
    str
        Empty without any source.
    """
    waiting = []
    for module in modules:
        # A missing module is reported when it is imported.
        *_, spec = (None, *specs_of(module))
        waiting += [Path(spec.origin)] if spec is not None and spec.origin else []
    sources: dict[Path, bytes] = {}
    while waiting:
        file = waiting.pop()
        if file not in sources and file.suffix == ".py" and file.is_file():
            sources[file] = file.read_bytes()
            words = set(re.findall(rb"\w+", sources[file]))
            beside = file.parent.glob("*.py")
            waiting += [other for other in beside if other.stem.encode() in words]
    digest = sha256()
    for file in sorted(sources):
        digest.update(file.name.encode() + b"\0" + sources[file])
    return digest.hexdigest()[:12] if sources else ""


_PACKAGE = Path(__file__).parent.parent
_FEW = 20
"""Maximum number of names listed in an error about another subject."""
_WORD = re.compile(r"[A-Za-z0-9][\w-]*")
_HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_")


def kebab(name: str) -> str:
    """Return the name of a class or function in lower case with hyphens: LatestMean, latest-mean.

    Consecutive capitals belong together: CASAPlus is casa-plus.
    """
    return _HUMPS.sub("-", name).lower()


def allow_local_imports() -> None:
    """Allow imports from the current folder.

    ``python3 -m`` does so by itself; a console script and Flower's processes do not.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def _error_summary(error: BaseException) -> str:
    """Return the type (unless a module is missing) and first message line of an exception."""
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return (
        first
        if isinstance(error, ImportError)
        else ": ".join(filter(None, (type(error).__name__, first)))
    )


def _reason(error: BaseException) -> str:
    """Return the error in a user's module in one line, with its position."""
    said = _error_summary(error)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
        if not Path(frame.filename).is_relative_to(Path(ast.__file__).parent / "importlib")
    ]
    if not frames:
        return said
    return f"{said} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


# -----------------------------------------------------------------------------
# Docstrings of objects, read from source.
# -----------------------------------------------------------------------------


def summary_of(target: str) -> str:
    """Return the first line of an object's docstring without importing it; empty if it has none.

    Parameters
    ----------
    target : str
        ``"module:attribute"``, or the path of a TOML file in the package with a ``description``.
    """
    if target.endswith(".toml"):
        text = (_PACKAGE / target).read_text(encoding="utf-8")
        return str(tomllib.loads(text).get("description", ""))
    return (docstring_of(target).strip().splitlines() or [""])[0]


def docstring_of(target: str) -> str:
    """Return an object's docstring without importing it; empty if it has none.

    For objects made by a call, such as a `Variant`, it is the first text among the arguments.
    """
    module, _, attribute = target.partition(":")
    return _docstrings(module).get(attribute, "")


@cache
def _docstrings(module: str) -> Mapping[str, str]:
    """Return the docstrings of a module's definitions, by name."""
    found: dict[str, str] = {}
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            given = [*node.value.args, *(keyword.value for keyword in node.value.keywords)]
            texts = (item.value for item in given if isinstance(item, ast.Constant))
            summary = next((text for text in texts if isinstance(text, str)), "")
            names = [name.id for name in node.targets if isinstance(name, ast.Name)]
            found |= dict.fromkeys(names, summary) if summary else {}
    return found


def _tree(module: str) -> ast.Module:
    """Return a module's syntax tree, empty without source."""
    *_, spec = (None, *specs_of(module))
    try:
        source = spec.loader.get_source(spec.name)  # type: ignore[union-attr]
        return ast.parse(source or "")
    except (ImportError, AttributeError, SyntaxError, ValueError):
        return ast.Module([], [])


def specs_of(module: str) -> list[ModuleSpec]:
    """Find a module and the packages around it, outermost first, without importing any.

    `importlib.util.find_spec` of a dotted name would import the packages. The current folder is
    searched last, as after :func:`allow_local_imports`.

    Returns
    -------
    list[ModuleSpec]
        Named by their last part; empty if the module is not found.
    """
    top, *parts = module.split(".")
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
        found = [] if spec is None else [spec]
        for part in parts:
            places = None if spec is None else spec.submodule_search_locations
            # Searched by its last part, since the search for a dotted name imports the package.
            spec = None if places is None else PathFinder.find_spec(part, [*places])
            if spec is None:
                return []
            found.append(spec)
    # Raised for `__main__` and malformed names.
    except (ImportError, AttributeError, KeyError, ValueError):
        return []
    return found


def files_of(module: str) -> list[str]:
    """Return the files that the import of a module runs, without importing; empty if not found.

    They include those of the packages around it. Built-in modules are given by name.
    """
    return [
        str(spec.origin) if spec.has_location else f"Python's {spec.name}"
        for spec in specs_of(module)
        # Folders without __init__.py run nothing.
        if spec.loader is not None
    ]


# -----------------------------------------------------------------------------
# The tables.
# -----------------------------------------------------------------------------


def _is_class_with(attribute: str) -> Callable[[Any], bool]:
    """Return a test for callables with an attribute."""
    return lambda found: callable(found) and hasattr(found, attribute)


def _named(objects: Mapping[str, str]) -> dict[str, str]:
    """Return the targets of objects by name, given those of each module.

    A word is an object, whose name is in lower case with hyphens, or ``name=object``.
    """
    words = ((module, word) for module, text in objects.items() for word in text.split())
    pairs = ((module, *word.rpartition("=")) for module, word in words)
    return {name or kebab(of): f"raceme.{module}:{of}" for module, name, _, of in pairs}


STRATEGIES = Registry(
    "strategy",
    _named(
        {
            "strategies.faacl.continual": "c-faacl=CFAACL",
            "strategies.fedbuff": "ACE ACED ca2fl=CA2FL FADAS fedbuff=FedBuff PORT",
            "strategies.personalized": "APFL Ditto fedper=FedPer fedrep=FedRep Standalone",
            "strategies.continual.strategy": "APD EWC fedweit=FedWeIT ssgd=StableSGD",
            "strategies.casa.strategy": "CASA casa-c=CASAC casa-d=CASAD CASAPlus",
            "strategies.cfl": "CFL CFLAsync OCFL",
            "strategies.profiles.cfl_gp": "cfl-gp=CFLGP",
            "strategies.csafl": "CSAFL g-fedavg=GFedAvg ga-fedavg=GAFedAvg nog-fedavg=NoGFedAvg "
            "r-fedavg=RFedAvg t-fedavg=TFedAvg ta-fedavg=TAFedAvg",
            "strategies.faacl.strategy": "FAACL FAACLAsync",
            "strategies.echopfl": "echopfl=EchoPFL",
            "strategies.fedasync": "fedasync=FedAsync",
            "strategies.fedavg": "fedavg=FedAvg fedmedian=FedMedian fedprox=FedProx "
            "fedtrimmedavg=FedTrimmedAvg Krum multikrum=MultiKrum",
            "strategies.fedcompass": "fedcompass=FedCompass",
            "strategies.feddrift": "feddrift=FedDrift feddrift-async=FedDriftAsync "
            "feddrift-eager=FedDriftEager",
            "strategies.flexcfl": "fedgroup=FedGroup flexcfl=FlexCFL flexcfl-async=FlexCFLAsync",
            "strategies.fedrc.strategy": "fedrc=FedRC",
            "strategies.ifca": "fesem=FeSEM IFCA IFCAAsync",
            "strategies.cdfl.strategy": "CDFL",
            "strategies.cdfl.fedsoft": "fedsoft=FedSoft fedsoft-async=FedSoftAsync",
            "strategies.fielding": "Fielding",
            "strategies.profiles.flux": "FLUX",
            "strategies.icfl": "ICFL ICFLAsync",
            "strategies.profiles.pacfl": "PACFL",
            "strategies.panicle.strategy": "Panicle",
        }
    ),
    group="raceme.strategies",
    expected="a subclass of raceme.core.strategy.Method",
    fits=_is_class_with("parameters_type"),
    declares="parameters_type",
    prefixed=True,
)

DATASETS = Registry(
    "dataset",
    _named(
        {
            "datasets.source": "Digits Synthetic",
            "datasets.images": "Mnist FashionMnist Cifar10 ImageFolder Usps",
            "datasets.npz": "Npz NpzFolder",
            "datasets.given": "Table arrays=Given",
            "datasets.leaf": "Characters Femnist Leaf",
        }
    ),
    group="raceme.datasets",
    expected="a subclass of raceme.datasets.source.Source, or def {name}(config)",
    fits=lambda found: (
        hasattr(found, "has_clients") if isinstance(found, type) else callable(found)
    ),
)

PARTITIONERS = Registry(
    "partition",
    _named(
        {
            "datasets.partition": "label_groups dirichlet dirichlet_by_class classes iid "
            "rotation_groups noise_groups scenario",
        }
    ),
    group="raceme.partitions",
    expected="def {name}(labels, config, rng)",
    fits=lambda found: not isinstance(found, type),
)

DRIFTS = Registry(
    "drift",
    _named(
        {
            "datasets.drift": "none=NoDrift SwapAll SwapPart Incremental Rotate LabelShift "
            "noise=NoiseDrift Concepts Mixture Tasks InOrder ScenarioStream",
        }
    ),
    group="raceme.drifts",
    expected="a subclass of raceme.datasets.drift.Drift",
    fits=_is_class_with("default_schedule"),
)
"""Drifts of clients' data during a run."""


class _Features(Registry):
    """Registry of features: only the keys of users' own features are prefixed.

    The options of the package's features, which every command line reads, are the dataclass
    ``Options`` of their packages.
    """

    def options_type(self, name: str) -> type[Any] | None:
        """Return the dataclass of the options of a name."""
        if not self.is_own(name):
            return super().options_type(name)
        package = self._targets[name].rpartition(".")[0]
        options: type[Any] = import_module(package).Options
        return options

    def prefix(self, name: str) -> str:
        """Return the prefix of the option keys of a name."""
        return "" if self.is_own(name) else super().prefix(name)

    def files(self) -> set[str]:
        """Return the names of the files that the package's features write into a run's folder."""
        packages = (self._targets[name].rpartition(".")[0] for name in filter(self.is_own, self))
        return {file for of in packages for file in getattr(import_module(of), "FILES", ())}

    def check(self, name: str) -> None:
        """Check without importing that a name is that of a user's own feature.

        Raises
        ------
        UserError
            It is not the name of a user's feature, or is ambiguous.
        """
        if self.is_own(name):
            raise UserError(f"Every run has the feature '{name}': set its keys instead.")
        if name not in self:
            raise unknown_name(self.kind, name, [*self._installed, "module:Class"])


FEATURES = _Features(
    "feature",
    {
        "secure": "raceme.features.secure.server:Secure",
        "protection": "raceme.features.protection.guards:protection",
        # Before own models, which it leaves out.
        "central-privacy": "raceme.features.central_privacy.server:CentralPrivacy",
        "own-model": "raceme.features.own_model.server:OwnModel",
        "short-upload": "raceme.features.short_upload.server:ShortUpload",
        "fair": "raceme.features.fair.server:Fair",
        "upload-scores": "raceme.features.upload_scores.server:UploadScores",
        "discrepancy": "raceme.features.discrepancy.server:Discrepancy",
        "task-tests": "raceme.features.task_tests.server:TaskTests",
        "client-map": "raceme.features.client_map.server:ClientMap",
    },
    group="raceme.features",
    expected="a subclass of raceme.core.feature.Feature",
    fits=_is_class_with("on_update"),
    prefixed=True,
)
"""Features of every run, in the order of their chain."""

PROTECTIONS = Registry(
    "protection",
    {
        "none": "raceme.features.protection.guards:NoProtection",
        "norm": "raceme.features.protection.guards:NormProtection",
        "filter": "raceme.features.protection.guards:FilterProtection",
        "trust": "raceme.features.protection.guards:TrustProtection",
    },
    group="raceme.protections",
    expected="a subclass of raceme.features.protection.guards.Guard",
    fits=_is_class_with("judge"),
)
ATTACKS = Registry(
    "attack",
    _named(
        {
            "simulation.attacks": "none=NoAttack scale=ScaleAttack SignFlip LabelFlip "
            "noise=NoiseAttack Backdoor EdgeAnti EdgePush Collude MinMax MinSum Mimic LongGood "
            "Replay Claims",
        }
    ),
    group="raceme.attacks",
    expected="a subclass of raceme.simulation.attacks.Attack",
    fits=_is_class_with("is_due"),
)
"""Attacks by simulated clients."""

MODELS = Registry(
    "model",
    _named(
        {
            "training.models": "mclr mlp cnn cnn1d gru lstm mlp300 mlp128 mlp512 cnn3x3 cnn6 "
            "cnn5x5 cnn5x5_wide cnn5x5_unpadded cnn_fedrep lenet5 lenet5_tanh resnet18",
        }
    ),
    group="raceme.models",
    expected="def {name}(input_shape, num_classes)",
    own_options=False,
)

DEVICES = Registry(
    "device profile",
    {
        path.stem: f"simulation/profiles/{path.name}"
        for path in sorted((_PACKAGE / "simulation" / "profiles").glob("*.toml"))
    },
    group="raceme.devices",
    expected="def {name}(clients, seed), which returns a Device for each client",
)
"""Built-in profiles are files; a user's own is a file or a function that makes the devices."""

CLIENT_WORK = Registry(
    "kind of work",
    _named(
        {
            "training.work": "train train_best evaluate test_steps use losses scores label_counts "
            "nearest_direction",
            "training.personal": "train_split train_beside train_interpolated train_mixed "
            "train_own",
            "strategies.faacl.client": "learn match lend",
            "strategies.continual.client": "train_elastic train_decomposed train_borrowing",
            "strategies.panicle.client": "train_sketch",
            "strategies.profiles.client": "principal_directions latent_most descriptors gradient",
            "strategies.fedrc.client": "label_masses train_weighted",
            "client_app": "describe",
        }
    ),
    group="raceme.client_work",
    expected="def {name}(work), which returns a WorkResult",
)
"""Work of clients: functions of a `ClientWork` that return a `WorkResult`. ``docs/security.md``
lists what each reveals."""

COMPLETIONS = Registry(
    "completion",
    {
        "task-parts": "raceme.strategies.continual.client:complete",
        "own-head": "raceme.training.personal:use_own_head",
        "pulled-model": "raceme.training.personal:use_own_model",
        "interpolation": "raceme.training.personal:use_interpolation",
        "own-mixture": "raceme.features.own_model.client:use_mixture",
    },
    group="raceme.completions",
    expected="def {name}(work)",
)
"""Functions that complete a received model in a client's network before a test."""

BEFORE_TRAINING = {"own-model": "raceme.features.own_model.client:model_to_train"}
"""Functions ``f(work, received)`` that return the model that a client trains in the place of a
received one, by the setting that asks for it; the change is added to the received model."""

AFTER_TRAINING = {"own-model": "raceme.features.own_model.client:train_own_model"}
"""Functions ``f(work, received, settings)`` that a client calls after it has trained a received
model, by the setting that asks for it."""
