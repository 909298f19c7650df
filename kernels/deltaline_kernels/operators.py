"""Public functions as operators of torch, `torch.ops.deltaline.<name>`: what torch.compile and torch.export see.

Called eagerly, a function is what it was, but that it refuses tensors that need a gradient, and that autocast changes
nothing of it. An operator takes flat arguments: of `Rows` and the like their fields, named `rows_control` and so on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from types import NoneType, SimpleNamespace
from typing import Any, Optional, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from deltaline_kernels.checks import check_no_gradient

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY = torch.library.Library("deltaline", "FRAGMENT")
# By name: each is `torch.ops.deltaline.<name>`.
OPERATORS: dict[str, Operator] = {}


def operator(
    fake: Callable[..., Any],
    *,
    mutates: Sequence[str] = (),
    results: int = 1,
    only: Mapping[str, type] | None = None,
    unused: Callable[[Any], None] | None = None,
    name: str | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function an operator.

    Args:
        fake: what the function returns, made of its arguments by keyword without a look at their contents: new tensors
            of the right sizes, arguments that are returned themselves, None. Of `Rows` and the like it sees the fields
            alone, and numbers may be symbolic.
        mutates: arguments that are written to.
        results: the most tensors that are returned.
        only: of which type an argument, if not None, may be for the operator to take it; NoneType: it never does. With
            others the function is called as it is, which breaks a graph.
        unused: checks the keywords behind the function's `**`, which change nothing, so that the operator lacks them.
        name: None: the function's own.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        own = Operator(function, fake, name or function.__name__, mutates, results, only or {}, unused)
        OPERATORS[own.name] = own

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.is_grad_enabled():
                own.check_gradients(*args, **kwargs)
            if torch.compiler.is_compiling():
                return cast(R, own.trace(*args, **kwargs))
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                with _without_autocast():
                    return function(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    return register


class Operator:
    """A function, and the operator made of it.

    Attributes:
        parameters: of the operator, by those of the function: the fields of one that is a data class, else itself.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        fake: Callable[..., Any],
        name: str,
        mutates: Sequence[str],
        results: int,
        only: Mapping[str, type],
        unused: Callable[[Any], None] | None,
    ) -> None:
        self.function, self.fake, self.name, self.results = function, fake, name, results
        self._check_unused = unused
        parameters = inspect.signature(function).parameters.items()
        signature = {key: value for key, value in parameters if value.kind is not value.VAR_KEYWORD}
        self._names = tuple(signature)
        self._defaults = {key: value.default for key, value in signature.items() if value.default is not value.empty}
        hints = get_type_hints(function)
        only = {key: NoneType for key in self._names if hints[key] is NoneType} | dict(only)
        self._only = tuple(only.items())
        self._why_none = f"{name} is no operator with objects for {' or '.join(only)}: docs/engines.md"
        types: dict[str, Any] = {}
        self._classes: dict[str, Any] = {}
        self.parameters: dict[str, tuple[str, ...]] = {}
        for key in self._names:
            if only.get(key) is NoneType:
                continue
            if is_dataclass(hints[key]):
                inner = get_type_hints(hints[key])
                self._classes[key] = hints[key]
                self.parameters[key] = tuple(field.name for field in fields(cast(Any, hints[key])))
                types |= {f"{key}_{field}": _schema_type(inner[field]) for field in self.parameters[key]}
            else:
                self.parameters[key] = ()
                types[key] = _schema_type(hints[key], only.get(key))
        self._define(types, mutates)

    def _define(self, types: Mapping[str, Any], mutates: Sequence[str]) -> None:
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
        returned = {0: None, 1: Tensor}.get(self.results, tuple[(Tensor,) * self.results])  # type: ignore[misc]

        def run(*flat: Any) -> Any:
            given = self._restore(flat, _build)
            if torch.is_grad_enabled():
                self.check_gradients(**given)
            with _without_autocast():
                return self._flatten_results(self.function(**given), flat)

        def run_fake(*flat: Any) -> Any:
            return self._flatten_results(self.fake(**self._restore(flat, _view)), flat)

        prototype = cast(Any, run)
        prototype.__signature__ = inspect.Signature(
            [inspect.Parameter(key, kinds, annotation=kind) for key, kind in types.items()],
            return_annotation=returned,
        )
        LIBRARY.define(self.name + torch.library.infer_schema(prototype, mutates_args=mutates))
        # Above autograd, for which nothing is registered: so a call of the operator itself is refused too.
        LIBRARY.impl(self.name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"deltaline::{self.name}", run_fake, lib=LIBRARY)
        self._call = getattr(torch.ops.deltaline, self.name).default

    def check_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError if an argument, or what it holds, needs a gradient."""
        for key, value in self.bind(args, kwargs).items():
            check_no_gradient(key, value)
            for field in self.parameters.get(key, ()):
                check_no_gradient(f"{key}.{field}", getattr(value, field, None))
            if isinstance(value, list | tuple):
                for i, item in enumerate(value):
                    check_no_gradient(f"{key}[{i}]", item)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the function does by a call of the operator."""
        given = self.bind(args, kwargs)
        if self._check_unused is not None:
            self._check_unused({key: given.pop(key) for key in tuple(given) if key not in self._names})
        if len(args) > len(self._names) or given.keys() != set(self._names):
            return self.function(*args, **kwargs)  # which says what is wrong
        for key, kind in self._only:
            if given[key] is not None and not isinstance(given[key], kind):
                torch._dynamo.graph_break(msg=self._why_none)
                return torch.compiler.disable(self.function)(**given)
        made = self._call(*self.flatten(given))
        made = made if isinstance(made, tuple) else (made,)
        # Arguments and None, which an operator can't return, are put where it has placeholders.
        wanted = self.fake(**given)
        parts = wanted if isinstance(wanted, tuple) else (wanted,)
        found = [part if part is None or _is_among(part, given.values()) else made[i] for i, part in enumerate(parts)]
        return tuple(found) if isinstance(wanted, tuple) else found[0]

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the function's arguments by name, defaults among them."""
        return self._defaults | dict(zip(self._names, args, strict=False)) | kwargs

    def flatten(self, given: Mapping[str, Any]) -> list[Any]:
        """Return the operator's arguments of those of the function."""
        flat = []
        for key, inner in self.parameters.items():
            if inner:
                flat += [getattr(given[key], field) for field in inner]
            else:
                flat.append(given[key])
        return flat

    def _restore(self, flat: Sequence[Any], build: Callable[[Any, dict[str, Any]], Any]) -> dict[str, Any]:
        """Return the function's arguments of those of the operator; `build` makes what has fields."""
        values = iter(flat)
        given = dict.fromkeys(self._names)
        for key, inner in self.parameters.items():
            if inner:
                given[key] = build(self._classes[key], {field: next(values) for field in inner})
            else:
                given[key] = next(values)
        return given

    def _flatten_results(self, made: Any, flat: Sequence[Any]) -> Any:
        """Return what the operator returns, with nothing in it where the function returns None or an argument."""
        if self.results == 0:
            return None
        parts = made if isinstance(made, tuple) else (made,)
        nothing = next(value for value in flat if isinstance(value, Tensor))
        found = [nothing.new_empty(0) if part is None or _is_among(part, flat) else part for part in parts]
        found += [nothing.new_empty(0) for _ in range(self.results - len(found))]
        return tuple(found) if self.results > 1 else found[0]


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Compute products in the dtypes of their operands: what is fp32 here is so for a reason."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _is_among(tensor: Tensor, values: Any) -> bool:
    return any(tensor is value for value in values)


def _build(made: type, values: dict[str, Any]) -> Any:
    """Return an object of that data class; what its constructor does not take is set behind it."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    taken = {field.name for field in fields(cast(Any, made)) if field.init}
    built = made(**{key: value for key, value in values.items() if key in taken})
    for key in values.keys() - taken:
        object.__setattr__(built, key, values[key])
    return built


def _view(made: type, values: dict[str, Any]) -> Any:
    return SimpleNamespace(**values)


def _schema_type(hint: Any, kind: type | None = None) -> Any:
    """Return the type that a schema is made of for an annotation; `kind` is that of the values which are taken."""
    members = [hint] if get_origin(hint) in (None, tuple, Sequence) or get_args(hint) == () else list(get_args(hint))
    if kind is not None:
        members = [kind, *(member for member in members if member is NoneType)]
    found = [member for member in members if member is not NoneType]
    assert len(found) == 1, f"{hint}: which of these is it to an operator?"
    plain = found[0]
    if get_origin(plain) is not None:
        plain = Sequence[get_args(plain)[0]]  # type: ignore[misc]
    return Optional[plain] if NoneType in members else plain  # noqa: UP045
