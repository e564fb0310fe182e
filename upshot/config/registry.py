"""Names → classes: `gsm8k`, or `my_pkg.mod:Thing`, with did-you-mean errors.

A registry owns packages; their modules are imported at the first look-up, so adding a thing is adding one file with a
decorator in it. `create` checks names, types and bounds of the options before anything is built.

A path is searched on Python's path, then in the current folder and in the folders passed to `look_in` (the recipe's).
The object found there is used only if it is of the registry's kind, which is checked before it is called, and only code
that the user trusts is imported (trust.py).
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from upshot.config.trust import check_trust, trusts_all
from upshot.core.errors import UserError, did_you_mean
from upshot.core.score import naming_errors

log = logging.getLogger(__name__)
T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])
BUNDLE = "options"
"""The parameter that takes all options of a thing at once."""


class Registry(Generic[T]):
    """One kind of thing that a recipe can name."""

    def __init__(self, kind: str, *packages: str, base: type | None = None, functions: bool = False) -> None:
        """Name the kind and where its modules are.

        base: the class of its things; None: they are functions. functions: plain functions will do as well.
        """
        self.kind, self.packages, self.base = kind, packages, base
        self.functions = functions or base is None
        self._things: dict[str, Callable[..., T]] = {}
        self._elsewhere: dict[str, tuple[str, str]] = {}
        self._loaded = False

    def register(self, name: str, *aliases: str) -> Callable[[C], C]:
        """Decorator: make a class (or factory) known by name and aliases."""

        def add(thing: C) -> C:
            for key in (name, *aliases):
                if self._things.get(key, thing) is not thing:
                    raise ValueError(f"two {self.kind}s are called '{key}'")
                self._things[key] = thing
            return thing

        return add

    def register_foreign(self, other: str, name: str, hint: str) -> None:
        """Accept the name that a thing has in another project, too, with a warning of what is different here."""
        self._elsewhere[other] = (name, hint)

    def names(self) -> list[str]:
        """All known names, sorted."""
        self._load()
        return sorted(self._things)

    def __contains__(self, name: str) -> bool:
        self._load()
        return name in self._things

    def get(self, name: str, where: str = "") -> Callable[..., T]:
        """The class behind a name or a `package.module:Thing` path."""
        if ":" in name:
            thing: Callable[..., T] = import_thing(name, self.kind, where)
            self._check_kind(thing, name)
            return thing
        self._load()
        if name in self._elsewhere:
            other, (name, hint) = name, self._elsewhere[name]
            log.warning("%s '%s' is '%s' here: %s", self.kind, other, name, hint)
        if name in self._things:
            return self._things[name]
        place = f" in {where}" if where else ""
        nearest = did_you_mean(name, self._things)
        raise UserError(f"unknown {self.kind} '{name}'{place}; {nearest} (your own: 'my_package.module:Thing')")

    def _check_kind(self, thing: Any, path: str) -> None:
        """Refuse what is not of this kind, before it is called: a recipe could name anything that Python can import."""
        made = _hints(thing).get("return") if inspect.isfunction(thing) else thing
        if self.base is not None and inspect.isclass(made) and issubclass(made, self.base):
            return
        is_class = inspect.isclass(thing)
        if path in _HELD or (self.functions and callable(thing) and not is_class and not inspect.isbuiltin(thing)):
            return
        kinds = [f"a subclass of {self.base.__module__}:{self.base.__name__}"] if self.base is not None else []
        kinds += ["a Python function"] if self.functions else []
        what = f"the class {thing.__name__}" if is_class else f"a {type(thing).__name__}"
        raise UserError(f"{self.kind} '{path}' is {what}; it should be {' or '.join(kinds)}")

    def create(self, name: str, options: Mapping[str, Any] | None = None, where: str = "", **context: Any) -> T:
        """Build a thing; `options` come from the recipe and are checked, `context` from the program.

        Context is passed only where the constructor names it.
        """
        thing = self.get(name, where)
        arguments = check_options(thing, options or {}, context, f"{self.kind} '{name}'", where)
        if lacking := ", ".join(sorted(getattr(thing, "__abstractmethods__", ()))):
            raise UserError(f"{self.kind} '{name}' does not define {lacking}")
        with naming_errors(f"{self.kind} '{name}'"):
            return thing(**arguments)

    def check(self, name: str, options: Mapping[str, Any] | None = None, where: str = "", **context: Any) -> None:
        """Raise what `create` would raise for a wrong name or option, without building."""
        check_options(self.get(name, where), options or {}, context, f"{self.kind} '{name}'", where)

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for package in self.packages:
            for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
                importlib.import_module(f"{package}.{module.name}")


_FOLDERS: list[Path] = []
"""Where to look for code once the user has asked for some: until then nothing can be imported from there."""


def look_in(folder: Path) -> None:
    """Find the user's own code in this folder, too; behind everything installed, so that it hides nothing."""
    if trusts_all():
        _search([folder])
    else:
        _FOLDERS.append(folder)


def _search(folders: Iterable[Path]) -> None:
    for folder in folders:
        if (place := str(folder.resolve())) not in sys.path:
            sys.path.append(place)


def import_thing(path: str, what: str, where: str = "") -> Any:
    """What stands at `package.module:Thing`; whatever keeps it from being imported is a `UserError`."""
    if path in _HELD:
        return _HELD[path]
    module_name, _, attribute = path.partition(":")
    place = f" in {where}" if where else ""
    if module_name == HELD:
        raise UserError(f"{what} '{path}'{place} exists only in another process; put it in a file and name its path")
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise UserError(f"{what} '{path}'{place} belongs to Python's standard library and is not a {what}")
    check_trust(path, what, where)
    _search([Path(), *_FOLDERS])
    importlib.invalidate_caches()  # the file may be younger than the folder's listing
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's own module: whatever it raises is theirs to fix
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            searched = f"{error}; searched {Path().resolve()}, the recipe's folder and Python's path"
            found = not f"{module_name}.".startswith(f"{error.name}.")
            why = f"its module needs '{error.name}': {error}" if found else searched
        raise UserError(f"cannot import {what} '{path}'{place}: {why}") from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if name.isidentifier() and not name.startswith("_")]
        nearest = did_you_mean(attribute, public)
        raise UserError(f"module '{module_name}' has no '{attribute}' ({what}{place}); {nearest}")
    return getattr(module, attribute)


HELD = "here"
_HELD: dict[str, Any] = {}
"""Objects without an import path (a lambda, a nested function), by the name that recipes use for them."""


def path_of(thing: Any) -> str:
    """The name by which a recipe can refer to this class or function: its import path, or a name that is valid only in
    this process if it has none."""
    name = str(getattr(thing, "__qualname__", type(thing).__name__))
    path = f"{getattr(thing, '__module__', '')}:{name}"
    if getattr(sys.modules.get(path.partition(":")[0]), name, None) is thing:
        return path
    number, held = 1, f"{HELD}:{name.rpartition('.')[2]}"
    while _HELD.setdefault(held, thing) is not thing:
        number += 1
        held = f"{HELD}:{name.rpartition('.')[2]}-{number}"
    return held


def check_options(
    thing: Callable[..., Any], options: Mapping[str, Any], context: Mapping[str, Any], what: str, where: str
) -> dict[str, Any]:
    """Keyword arguments for a constructor: options validated against its annotations, context where named.

    Bounds stand in the annotations (`workers: Count`). Who has many options takes them together: a parameter `options`
    whose type is a pydantic model or a dataclass stands for its fields.
    """
    named, hints, open_ended = parameters_of(thing)
    bundle = hints.get(BUNDLE) if BUNDLE in named else None
    inner = {} if bundle is None else inspect.signature(bundle).parameters
    known = {*named, *inner} - {*context, BUNDLE}
    what = f"{what} in {where}" if where else what
    unknown = next((key for key in options if key not in known), None)
    if unknown is not None and (unknown in context or not open_ended):
        raise UserError(f"unknown option '{unknown}' of {what}; {did_you_mean(str(unknown), known)}")
    out = {key: value for key, value in context.items() if key in named}
    single = {key: value for key, value in options.items() if bundle is None or key in named}
    out |= {key: _check_one(what, key, value, hints.get(key, Any)) for key, value in single.items()}
    if bundle is not None:
        out[BUNDLE] = _check_one(what, "", {k: v for k, v in options.items() if k not in single}, bundle)
    missing = [key for key, parameter in named.items() if parameter.default is parameter.empty and key not in out]
    if missing:
        raise UserError(f"{what} needs the option '{missing[0]}'")
    return out


def with_options(
    function: Callable[..., T], options: Mapping[str, Any] | None, places: Sequence[str], what: str, where: str
) -> Callable[..., T]:
    """A function with its options from a recipe filled in; it is called with `places` by position, whatever it calls
    them."""
    signature = inspect.signature(function)
    try:
        names = list(signature.bind_partial(*places).arguments)
    except TypeError:
        raise UserError(f"{what} in {where} is called with ({', '.join(places)}), but takes {signature}") from None
    checked = check_options(function, options or {}, dict.fromkeys(names), what, where)
    return partial(function, **{name: value for name, value in checked.items() if name not in names})


def _check_one(what: str, key: str, value: Any, kind: Any) -> Any:
    from upshot.config.validation import check_value

    try:
        return check_value(key, value, kind)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


def parameters_of(thing: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], dict[str, Any], bool]:
    """Named parameters, their types, and whether any other keyword is taken.

    A constructor that passes `**options` on to its base class takes the base's parameters, too.
    """
    classes = [c for c in thing.__mro__ if "__init__" in vars(c)] if inspect.isclass(thing) else []
    named: dict[str, inspect.Parameter] = {}
    hints: dict[str, Any] = {}
    for target in [vars(c)["__init__"] for c in classes if c is not object] or [thing]:
        parameters = inspect.signature(target).parameters
        for name, parameter in parameters.items():
            if name != "self" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                named.setdefault(name, parameter)
        hints = _hints(target) | hints
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return named, hints, False
    return named, hints, bool(named or classes)


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Annotations with their bounds; one whose words cannot be found (imported for the type checker) checks nothing."""
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError:
        annotations = dict(getattr(target, "__annotations__", {}))
    out: dict[str, Any] = {}
    for name, annotation in annotations.items():
        with suppress(NameError):
            lone = SimpleNamespace(__annotations__={name: annotation}, __wrapped__=target)
            out |= typing.get_type_hints(lone, include_extras=True)
    return out
