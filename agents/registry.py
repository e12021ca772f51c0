"""Node types by name: "module:Class", imported only when built; users' classes come only from files a config names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from jointrag.data.errors import ConfigError, GraphError, nearest

NODES: dict[str, str | type[Any]] = {
    "rewriter": "jointrag.agents.rewriter:Rewriter",
    "retriever": "jointrag.agents.retriever:Retriever",
    "evidence_filter": "jointrag.agents.evidence_filter:EvidenceFilter",
    "answerer": "jointrag.agents.answerer:Answerer",
}
OTHER_TYPES = ("subgraph", "function")  # built by graph.declare
Plugins = Mapping[str, ModuleType]  # file stem -> module

_loaded: dict[Path, tuple[str, ModuleType]] = {}  # plugin file -> (sha256 of what was imported, module)


def register(name: str, target: str | type[Any]) -> None:
    """Make an agent class known by name."""
    NODES[name] = target


# --- the user's files -------------------------------------------------------------------------------------------------


def load_plugins(paths: Iterable[str | Path]) -> dict[str, ModuleType]:
    """Import the user's files, each under its stem; a file that has not changed is imported once a process."""
    plugins: dict[str, ModuleType] = {}
    for path in paths:
        module = load_plugin(path)
        other = plugins.setdefault(module.__name__, module)
        if other is not module:
            raise ConfigError(
                f"plugins: got two files named {module.__name__!r} ({other.__file__} and {module.__file__}), expected "
                f"a name of its own for each; rename one."
            )
    return plugins


def load_plugin(path: str | Path) -> ModuleType:
    """Import one file; its module name is the file's stem."""
    file = Path(path).expanduser().resolve()
    stem = file.stem
    if file.suffix != ".py" or not stem.isidentifier():
        raise ConfigError(f"plugins: got {str(path)!r}, expected a Python file such as my_agents.py; rename the file.")
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as e:
        others = (p.name for p in file.parent.glob("*.py")) if file.parent.is_dir() else ()
        raise ConfigError(
            f"plugins: got {str(path)!r}, which cannot be read ({e.strerror}), expected a Python file; "
            f"plugin paths are relative to the config.{nearest(file.name, others)}"
        ) from e
    known = _loaded.get(file)
    if known is not None and known[0] == digest:
        sys.modules[stem] = known[1]
        return known[1]
    taken = sys.modules.get(stem)
    ours = any(taken is module for _, module in _loaded.values())
    if stem in sys.stdlib_module_names or (taken is not None and not ours):
        raise ConfigError(
            f"plugins: got {str(path)!r}, whose name {stem!r} belongs to another module, expected a name of its own; "
            f"rename the file, for example to my_{stem}.py."
        )
    spec = importlib.util.spec_from_file_location(stem, file)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module  # before it runs: dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException as e:
        if taken is None:
            del sys.modules[stem]
        else:
            sys.modules[stem] = taken
        if isinstance(e, ConfigError) or not isinstance(e, (Exception, SystemExit)):
            raise
        raise ConfigError(
            f"plugins: got {type(e).__name__} while importing {file}{_line(e, file)}: {e}; expected a file that "
            f"imports; run `python {file}` and mend it."
        ) from e
    _loaded[file] = (digest, module)
    return module


def _line(error: BaseException, file: Path) -> str:
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(file) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}" if line else ""


def resolve(name: str, plugins: Plugins, where: str) -> Any:
    """Return what a dotted name such as "my_agents.join" means in the plugin files."""
    stem, *rest = name.split(".")
    if stem not in plugins:
        have = ", ".join(f"{p}.py" for p in plugins) or "no file"
        raise GraphError(
            f"{where}: got {name!r}, but `plugins` names {have}; expected its file there: "
            f"add `plugins: [{stem}.py]`.{nearest(stem, plugins)}"
        )
    value: Any = plugins[stem]
    for i, part in enumerate(rest):
        if not hasattr(value, part):
            known = [n for n in vars(value) if not n.startswith("_")]
            raise GraphError(
                f"{where}: got {name!r}, but {'.'.join([stem, *rest[:i]])} has no {part!r}; expected a name that "
                f"{stem}.py defines.{nearest(part, known)}"
            )
        value = getattr(value, part)
    return value


# --- agents -----------------------------------------------------------------------------------------------------------


def agent_class(name: object, plugins: Plugins, where: str) -> type[Any]:
    """Return the Agent class of a node type: a registered name, or a dotted name out of a plugin file."""
    from jointrag.agents.base import Agent

    known = (*NODES, *OTHER_TYPES)
    if not isinstance(name, str) or (name not in NODES and "." not in name):
        raise GraphError(
            f"{where}.type: got {name!r}, expected one of {', '.join(known)}, or a plugin's class such as "
            f"my_agents.Reranker; correct the type.{nearest(str(name), known)}"
        )
    target: Any
    if name in NODES:
        target = NODES[name]
        if isinstance(target, str):
            module, _, cls = target.partition(":")
            target = getattr(importlib.import_module(module), cls)
    else:
        target = resolve(name, plugins, f"{where}.type")
    if not (isinstance(target, type) and issubclass(target, Agent)):
        hint = "; for a plain function write `{type: function, call: " + name + "}`" if callable(target) else ""
        raise GraphError(
            f"{where}.type: got {name!r}, which is {_kind(target)}, expected a subclass of jointrag.agents.Agent{hint}."
        )
    return target


def build_agent(key: str, spec: Mapping[str, Any], plugins: Plugins, where: str) -> Any:
    """Build the agent of one node: its parameters are its class's constructor arguments, its name the node's key."""
    from jointrag.agents.base import Agent

    cls = agent_class(spec.get("type"), plugins, where)
    arguments = check_arguments(cls, {k: v for k, v in spec.items() if k != "type"}, where)
    if spec["type"] in NODES:
        for name, value in arguments.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                raise GraphError(f"{where}.{name}: got {value!r}, expected a number above 0; correct it.")
    try:
        agent = cls(**arguments)
    except ConfigError as e:
        raise GraphError(f"{where}: {e}") from e
    except Exception as e:
        raise GraphError(
            f"{where}: got {type(e).__name__} while building {cls.__name__}: {e}; expected other parameters."
        ) from e
    agent.name = key
    if cls.__call__ is Agent.__call__ and cls.act is Agent.act:
        for method in ("observe", "update"):
            if getattr(cls, method) is getattr(Agent, method):
                raise GraphError(
                    f"{where}: got {cls.__name__} without `{method}`, expected every agent to have one; "
                    f"define {method}(self, state{', value' if method == 'update' else ''})."
                )
    for attribute in ("reads", "writes"):
        keys = getattr(agent, attribute)
        if isinstance(keys, str) or not all(isinstance(k, str) for k in keys):
            raise GraphError(
                f'{where}: got {cls.__name__}.{attribute} = {keys!r}, expected a tuple of state keys; write ("key",).'
            )
    return agent


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


# --- parameters -------------------------------------------------------------------------------------------------------


def check_arguments(target: Callable[..., Any], given: Mapping[str, Any], where: str, skip: int = 0) -> dict[str, Any]:
    """Check YAML keys against the signature of `target`, its first `skip` parameters left out; return the values."""
    try:
        parameters = list(inspect.signature(target).parameters.values())[skip:]
    except (TypeError, ValueError):  # a builtin without a signature
        return dict(given)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in given:
        if key not in named and not open_ended:
            expected = f"one of {', '.join(named)}" if named else "none"
            raise GraphError(
                f"{where}.{key}: got an unknown parameter, expected {expected}; correct or remove it."
                f"{nearest(str(key), named)}"
            )
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given:
            raise GraphError(f"{where}: got no {name!r}, expected it; add `{name}: ...`.")
    hints = _hints(target)
    return {key: _checked(value, hints.get(key, Any), f"{where}.{key}") for key, value in given.items()}


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(vars(target).get("__init__", target) if isinstance(target, type) else target)
    except Exception:  # names that only a type checker sees
        return {}


def _checked(value: Any, hint: Any, where: str) -> Any:
    simple = {hint, *typing.get_args(hint)} <= {int, float, str, bool, type(None)} | {hint}
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        try:
            adapter = TypeAdapter(hint)
        except Exception:
            return value
    except Exception:  # a hint pydantic knows nothing of
        return value
    try:
        return adapter.validate_python(value, strict=simple)
    except ValidationError as e:
        expected = "; or ".join(dict.fromkeys(x["msg"].removeprefix("Input should be ") for x in e.errors()))
        raise GraphError(f"{where}: got {value!r}, expected {expected}; correct it.") from e


__all__ = [
    "NODES",
    "OTHER_TYPES",
    "agent_class",
    "build_agent",
    "check_arguments",
    "load_plugins",
    "register",
    "resolve",
]
