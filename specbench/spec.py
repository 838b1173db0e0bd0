"""Method SPECs: `name:key=value,key=value`, what they name, and the methods there are.

A list value is joined with `+`, a nested SPEC stands in parentheses, `./file.py::Class:key=value` loads a
file. Methods are found in `specbench.methods` (one file each), by entry point `specbench.methods`, or in
a file.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import types
import typing
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError, first_line

# What a method has to quantise is its draft; `quantize` alone is read too.
WRITTEN = {"quantize": "draft.quantize"}
NOT_WRITTEN = "an option that can be given on the command line"


@dataclass(frozen=True)
class Spec:
    """A parsed SPEC: the method's name (or `file.py::Class`) and its options, names and values as written."""

    name: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The normalised SPEC: options in alphabetical order. It is the method's label everywhere."""
        if not self.options:
            return self.name
        return self.name + ":" + ",".join(f"{key}={value}" for key, value in sorted(self.options.items()))

    @property
    def parameters(self) -> dict[str, str]:
        """The options under the names that the method's constructor has for them."""
        return {parameter(key): value for key, value in self.options.items()}


def parse_spec(text: str) -> Spec:
    """Parse a SPEC.

    Raises:
        SpecbenchError: for unbalanced parentheses, an option without "=", or one given twice.
    """
    text = text.strip()
    path, separator, rest = text.partition("::")
    if separator and path.count("(") == path.count(")"):  # else it is a nested SPEC that names a file
        head, _, tail = rest.partition(":")
        name = f"{path}::{head}"
    else:
        name, _, tail = text.partition(":")
    if not name:
        raise SpecbenchError(f"method {text!r} has no name", "write it as name or name:key=value,key=value")
    options: dict[str, str] = {}
    for part in _split(tail, text):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key or not value:
            raise SpecbenchError(
                f"option {part!r} of method {text!r} is not key=value", "write it as name:key=value,key=value"
            )
        if parameter(key) in map(parameter, options):
            raise SpecbenchError(f"option {key!r} of method {text!r} is given twice", "give it once")
        options[key] = value.strip()
    return Spec(name, options)


def parameter(key: str) -> str:
    """The constructor's name for an option."""
    return next((name for name, written in WRITTEN.items() if written == key), key)


def written(name: str) -> str:
    """How the constructor's parameter `name` is written in a SPEC."""
    return WRITTEN.get(name, name)


def _split(text: str, whole: str) -> list[str]:
    """Split at commas outside parentheses."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    if depth != 0:
        raise SpecbenchError(f"parentheses do not match in {whole!r}", "nest a SPEC as key=(name:key=value)")
    parts.append(current)
    return [part for part in parts if part.strip()]


def method_names() -> list[str]:
    """Names of all installed methods, found without importing them."""
    package = importlib.import_module("specbench.methods")
    bundled = {m.name.replace("_", "-") for m in pkgutil.iter_modules(package.__path__) if m.name[0] != "_"}
    return sorted(bundled | {entry.name for entry in entry_points(group="specbench.methods")})


def find_method(name: str) -> type:
    """The class a SPEC's name stands for: a `Drafter` or a `Method`.

    Raises:
        SpecbenchError: unknown name, or a file that does not load or has no such class.
    """
    if "::" in name:
        return _from_file(name)
    module_name = name.replace("-", "_")
    package = importlib.import_module("specbench.methods")
    if name in {m.name.replace("_", "-") for m in pkgutil.iter_modules(package.__path__)}:
        module = importlib.import_module(f"specbench.methods.{module_name}")
        return _only_class(module, name)
    for entry in entry_points(group="specbench.methods"):
        if entry.name == name:
            return _checked(entry.load(), name)
    near = difflib.get_close_matches(name, method_names(), 1)
    raise SpecbenchError(
        f"unknown method {name!r}" + (f" (did you mean {near[0]}?)" if near else ""),
        "see `specbench ls methods`, or load your own with --method ./file.py::Class",
    )


def summary_line(cls: type) -> str:
    """The first line of a method's docstring, for reading: without the marks of code."""
    return (inspect.getdoc(cls) or "").partition("\n")[0].replace("`", "")


def options_of(cls: type) -> dict[str, inspect.Parameter]:
    """The options a method takes: the parameters of its constructor after the target."""
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name: p for p in _parameters(cls) if p.kind in named}


def takes_any_option(cls: type) -> bool:
    """Whether the constructor ends in `**options` of its own (what a Drafter inherits means nothing)."""
    from specbench.decoding.draft import Drafter

    own = cls.__init__ is not Drafter.__init__  # type: ignore[misc]
    return own and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _parameters(cls))


def _parameters(cls: type) -> list[inspect.Parameter]:
    try:
        signature = inspect.signature(cls, eval_str=True)
    except NameError:  # an annotation imported for type checkers only: the defaults' types must do
        signature = inspect.signature(cls)
    return list(signature.parameters.values())[1:]


def convert_options(cls: type, spec: Spec) -> dict[str, Any]:
    """The SPEC's options as the types the constructor asks for.

    Raises:
        SpecbenchError: for an unknown key (listing those there are) or a value of the wrong kind.
    """
    known = options_of(cls)
    values = {}
    for key, text in spec.options.items():
        name = parameter(key)
        if name in known:
            values[name] = _convert(text, _kind(known[name]), key, spec)
        elif takes_any_option(cls):
            values[name] = _guessed(text)
        else:
            listed = ", ".join(sorted(map(written, known))) or "none"
            raise SpecbenchError(f"method {spec.name} has no option {key!r}", f"its options: {listed}")
    return values


def _kind(parameter: inspect.Parameter) -> Any:
    """What an option's value must be: its annotation, else the type of its default."""
    if parameter.annotation is not inspect.Parameter.empty and not isinstance(parameter.annotation, str):
        return parameter.annotation
    default = parameter.default
    return str if default is inspect.Parameter.empty or default is None else type(default)


def _convert(text: str, kind: Any, key: str, spec: Spec) -> Any:
    errors = []
    for option in _alternatives(kind):
        try:
            return _as(text, option)
        except ValueError as error:
            errors.append(str(error))
    wanted = " or ".join([words for words in errors if words != NOT_WRITTEN] or errors)
    raise SpecbenchError(f"option {key}={text} of {spec.name} is not {wanted}", f"give {key} as {wanted}")


def _guessed(text: str) -> Any:
    """The value of an option that nothing describes: a number or a truth value where it reads like one."""
    for kind in (int, float, bool):
        with contextlib.suppress(ValueError):
            return _as(text, kind)
    return text


def _alternatives(kind: Any) -> list[Any]:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return [a for a in typing.get_args(kind) if a is not type(None)]
    return [kind]


def _as(text: str, kind: Any) -> Any:
    """`text` as `kind`; ValueError holds the words for what was expected."""
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError("true or false")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError("a whole number" if kind is int else "a number") from None
    if typing.get_origin(kind) is typing.Literal:
        if text in typing.get_args(kind):
            return text
        raise ValueError(" or ".join(map(str, typing.get_args(kind))))
    if typing.get_origin(kind) is list:
        return [_as(part, typing.get_args(kind)[0]) for part in text.split("+")]
    if kind is Spec:
        if text.startswith("(") and text.endswith(")"):
            return parse_spec(text[1:-1])
        raise ValueError("a SPEC in parentheses")
    if kind is str:
        return text
    raise ValueError(NOT_WRITTEN)


def _from_file(name: str) -> type:
    path, _, class_name = name.partition("::")
    file = Path(path).expanduser()
    if not file.is_file():
        raise SpecbenchError(
            f"method file {path} does not exist", "give the path of a Python file: ./file.py::Class"
        )
    module = _module(path, file)
    if not hasattr(module, class_name):
        raise SpecbenchError(
            f"method file {path} has no class {class_name!r}", "name a class that is in the file"
        )
    return _checked(getattr(module, class_name), name)


def _module(path: str, file: Path) -> types.ModuleType:
    """The module of a file, run anew; in `sys.modules`, where dataclasses and pickle look for it."""
    module_spec = importlib.util.spec_from_file_location(f"specbench_method_{file.stem}", file)
    if module_spec is None or module_spec.loader is None:
        raise SpecbenchError(f"method file {path} is not a Python file", "give a path ending in .py")
    module = sys.modules[module_spec.name] = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_spec.name]
        raise SpecbenchError(
            f"method file {path} does not load: {first_line(error)}", "mend the file and try again"
        ) from error
    return module


def _only_class(module: types.ModuleType, name: str) -> type:
    own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    methods = [cls for cls in own if _is_method(cls) and not cls.__name__.startswith("_")]
    if len(methods) != 1:
        raise SpecbenchError(
            f"method file {name} holds {len(methods)} public method classes", "keep exactly one a file"
        )
    return methods[0]


def _checked(cls: Any, name: str) -> type:
    if not (isinstance(cls, type) and _is_method(cls)):
        raise SpecbenchError(
            f"{name} is not a Drafter or a Method", "subclass specbench.decoding.draft.Drafter"
        )
    return cls


def _is_method(cls: type) -> bool:
    from specbench.decoding.draft import Drafter
    from specbench.decoding.method import Method

    return issubclass(cls, Drafter | Method)
