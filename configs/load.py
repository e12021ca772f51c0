"""YAML, its parents and the command line's `a.b=c` become one checked Config; every error names file, key and fix.

How a file is laid over its parent (`extends`), and the first file over the defaults: mappings merge key by key, lists
and values replace, `{}` clears, and `null` takes a key back to its default. Four exceptions, where a merge would mix
two things that are alternatives:

- `data`: a child that changes between the world and files replaces it;
- `index` and each entry of `graph.nodes`: a child that changes the `type` replaces it;
- each entry of `graph.edges`, `llm.heads` and `agents.<name>.mode` is replaced whole;
- `graph.edges` with a START is a whole graph: it replaces the parent's edges and, where it gives `nodes`, its nodes.
  Without a START it changes single edges of a parent file. `nodes` alone changes single nodes. `null` removes one.

Paths: plugin, prompt and subgraph files are relative to the file that names them and become absolute here; data, index
and run paths stay relative to the working directory.
"""

from __future__ import annotations

import copy
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from jointrag.configs.schema import DEFAULT_EDGES, DEFAULT_NODES, DEFAULT_PROCESS, Config, GraphConfig
from jointrag.data.errors import CheckpointError, ConfigError, nearest

Key = tuple[Any, ...]
DEFAULT = "default"  # origin of a value that no file gave
SHOWN = 120  # characters of a wrong value that a message quotes
WHOLE: tuple[Key, ...] = (("graph", "edges", "*"), ("llm", "heads"), ("agents", "*", "mode"), ("index", "*"))
RAW: tuple[Key, ...] = (("graph", "nodes", "*"), ("graph", "edges", "*"), ("index",))  # `null` in them is a value

_YAML = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


def _resolvers(of: Mapping[str, list[tuple[str, Any]]]) -> dict[str, list[tuple[str, Any]]]:
    """YAML 1.2's idea of plain scalars: yes, no, on and off are words, dates are text, 1e-3 is a number."""
    drop = {_YAML + "bool", _YAML + "float", _YAML + "timestamp"}
    out = {first: [pair for pair in pairs if pair[0] not in drop] for first, pairs in of.items()}
    for first in "tTfF":
        out.setdefault(first, []).append((_YAML + "bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")))
    for first in "-+0123456789.":
        out.setdefault(first, []).insert(0, (_YAML + "float", _FLOAT))
    return out


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers(yaml.SafeLoader.yaml_implicit_resolvers)

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], Any] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _YAML + "merge":
                first = seen.setdefault((key.tag, key.value), key)
                if first is not key:
                    raise yaml.MarkedYAMLError(
                        problem=f"got the key {key.value!r} twice (first on line {first.start_mark.line + 1}), "
                        f"expected each key once; remove one",
                        problem_mark=key.start_mark,
                    )
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers(yaml.SafeDumper.yaml_implicit_resolvers)

    def ignore_aliases(self, data: Any) -> bool:
        return True


# --- the public face --------------------------------------------------------------------------------------------------


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = (), *, need_data: bool = True
) -> Config:
    """Read a file, a run folder, a shipped config by name (`demo`, `graph/two_hops`) or a mapping, and check it.

    `need_data=False` accepts a config that names no data: enough to draw or compile its graph.
    """
    raw, origin, label = _gather(source)
    for override in overrides:
        _set(raw, origin, override)
    _drop_absent(raw, origin, label)
    config = _parse(Config, raw, origin, label)
    if need_data and not config.data.given:
        raise ConfigError(
            f"{label}: data: got nothing, expected the data to work on; add `data: {{world: {{}}}}` for the built-in "
            f"world, or `data: {{corpus: corpus.jsonl, train: .., dev: .., test: ..}}`."
        )
    return config


def load_run(folder: Path, overrides: Sequence[str] = (), need_data: bool = True) -> Config:
    """Return the config of a run folder, which has to be one; `need_data`: of one that holds its graph and data."""
    if folder.is_file():
        out = load_config(folder, need_data=False).out
        raise CheckpointError(f"{folder}: got a config, expected the folder of its run, which is {out}")
    if not folder.exists():
        raise CheckpointError(f"{folder}: got no such folder, expected one written by `jointrag train`; check the path")
    file = folder / "config.yaml"
    if not any((folder / name).exists() for name in ("checkpoint", "heads", "metrics.jsonl")):
        has = f"; the run of {file} is {load_config(file, need_data=False).out}" if file.is_file() else ""
        raise CheckpointError(f"{folder}: got no run folder, expected one written by `jointrag train`{has}")
    if not file.is_file():
        raise CheckpointError(f"{folder}: got no run folder: config.yaml is missing; expected it: put it back")
    config = load_config(file, overrides, need_data=False).model_copy(update={"out": str(folder)})
    if need_data and not config.data.given:
        raise CheckpointError(
            f"{folder}: got a run trained from Python, which holds heads and no graph or data, expected one of a "
            f"config; use it from Python: build the pipeline as for training and write jointrag.load({str(folder)!r}, "
            f"pipeline=...)"
        )
    return config


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value in one, value in other) where two configs differ, `out` left out."""

    def flat(value: Any, at: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from flat(inner, f"{at}.{key}" if at else str(key))
        else:
            yield at, value

    def whole(config: Config) -> dict[str, Any]:  # an agent the file does not mention has the default settings
        agents = {name: config.agent(name).model_dump() for name in (*one.agents, *other.agents)}
        return config.model_dump(exclude={"out"}) | {"agents": agents}

    a, b = (dict(flat(whole(c), "")) for c in (one, other))
    return {key: (a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)}


def load_graph(path: str | os.PathLike[str]) -> tuple[GraphConfig, list[str]]:
    """Read the graph of a config file, or of a file that holds nothing but a graph; with the plugins it needs."""
    config = load_config(path, need_data=False)
    return config.graph, list(config.plugins)


def dump_config(config: Config) -> str:
    """Return the config as YAML, every key spelled out; `load_config` of it gives an equal config."""
    raw = _without_none(config.model_dump())
    process = raw["rewards"]["process"]
    if process:  # the defaults lie under every file: an agent without terms has to say so
        raw["rewards"]["process"] = {**{name: [] for name in DEFAULT_PROCESS}, **process}
    return yaml.dump(raw, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _without_none(section: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is not given, except inside the raw mappings."""
    out = {}
    for key, value in section.items():
        if isinstance(value, dict) and key not in ("index", "nodes", "edges", "process"):
            value = _without_none(value)
        if value is not None:
            out[key] = value
    return out


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML mapping; an empty file is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise ConfigError(f"{path}: got no such file, expected a YAML config; check the path.{_near(path)}") from e
    except IsADirectoryError as e:
        raise ConfigError(f"{path}: got a folder without config.yaml, expected a YAML config; name the file.") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: got bytes that are no UTF-8 ({e.reason}), expected YAML text; convert it.") from e
    except OSError as e:
        raise ConfigError(f"{path}: got {e.strerror!r}, expected a readable YAML config; check its rights.") from e
    value = _yaml(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: got {_show(value)}, expected a mapping such as `seed: 0`; write `key: value` lines."
        )
    return value


def shipped() -> list[str]:
    """Return the names of the configs that come with the package."""
    root = Path(str(resources.files("jointrag.configs")))
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))


# --- gathering: parents first -----------------------------------------------------------------------------------------


def _gather(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], dict[Key, str], str]:
    """Return the merged raw mapping, which file gave which key, and the name of the outermost source."""
    raw: dict[str, Any] = {
        "graph": {"nodes": copy.deepcopy(DEFAULT_NODES), "edges": copy.deepcopy(DEFAULT_EDGES)},
        "rewards": {"process": copy.deepcopy(DEFAULT_PROCESS)},
    }
    origin: dict[Key, str] = {("graph", "edges"): DEFAULT}
    if isinstance(source, Mapping):
        label = "config"
        _check_tree(source, label)
        layers = list(_chain(copy.deepcopy(dict(source)), label, None, ()))
    else:
        path = _find(source)
        label = str(path)
        layers = list(_chain(read_yaml(path), label, path, ()))
    for name, layer in reversed(layers):
        if isinstance(layer.get("graph"), dict):
            _new_graph(raw, layer["graph"], origin)
        _merge(raw, layer, (), name, origin)
    return raw, origin, label


def _check_tree(value: Any, label: str, above: tuple[int, ...] = ()) -> None:
    """Refuse a mapping or list that contains itself, as a YAML alias can make it."""
    if len(above) > 50 or id(value) in above:
        raise ConfigError(
            f"{label}: got a mapping or list that contains itself, or is nested deeper than 50, expected a plain "
            f"config; remove the YAML alias."
        )
    if isinstance(value, (Mapping, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_tree(item, label, (*above, id(value)))


def _chain(
    layer: dict[str, Any], label: str, path: Path | None, seen: tuple[Path, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a file's own keys, then its parent's, then its grandparent's."""
    layer = _bare_graph(layer)
    parent = layer.pop("extends", None)
    if path is not None:
        _absolute(layer, path.parent)
        seen = (*seen, path.resolve())
    yield label, layer
    if parent is None:
        return
    if not isinstance(parent, str) or not parent:
        raise ConfigError(f"{label}: extends: got {_show(parent)}, expected one file name; write `extends: base.yaml`.")
    base = path.parent if path is not None else Path()
    try:
        found = _find(parent, base)
    except ConfigError as e:
        raise ConfigError(f"{label}: extends: {e}") from e
    if found.resolve() in seen:
        ring = " -> ".join(p.name for p in (*seen, found))
        raise ConfigError(f"{label}: extends: got the ring {ring}, expected parents that end; remove one `extends`.")
    yield from _chain(read_yaml(found), str(found), found, seen)


def _bare_graph(layer: dict[str, Any]) -> dict[str, Any]:
    """A file with `nodes` or `edges` at its top is the graph of a config."""
    if ("nodes" in layer or "edges" in layer) and "graph" not in layer:
        keys = set(GraphConfig.model_fields)
        graph = {key: value for key, value in layer.items() if key in keys}
        return {**{key: value for key, value in layer.items() if key not in keys}, "graph": graph}
    return layer


def _find(source: str | os.PathLike[str], base: Path | None = None) -> Path:
    """Return the file meant by a path (relative to `base`), a folder with a config.yaml, or a shipped name."""
    path = Path(base or "", Path(source).expanduser())
    if (path / "config.yaml").is_file():
        return path / "config.yaml"
    if path.is_file():
        return path
    name = str(source).removesuffix(".yaml")
    known = shipped()
    if name in known:
        return Path(str(resources.files("jointrag.configs"))) / f"{name}.yaml"
    if path.exists():
        raise ConfigError(f"{path}: got a folder without config.yaml, expected a YAML config; name the file.")
    hint = nearest(name, known) or _near(path)
    raise ConfigError(
        f"{path}: got no such file, expected a YAML config or one of the shipped {', '.join(known)}; "
        f"check the path.{hint}"
    )


def _near(path: Path) -> str:
    folder = path.parent
    return nearest(path.name, (p.name for p in folder.iterdir())) if folder.is_dir() else ""


def _absolute(layer: dict[str, Any], base: Path) -> None:
    """Make plugin, prompt and subgraph files absolute: they are relative to the file that names them."""

    def at(holder: Any, key: Any) -> None:
        if isinstance(holder[key], str):
            holder[key] = os.path.abspath(base / Path(holder[key]).expanduser())

    if isinstance(plugins := layer.get("plugins"), list):
        for i in range(len(plugins)):
            at(plugins, i)
    graph = layer.get("graph")
    nodes = graph.get("nodes") if isinstance(graph, dict) else None
    for group in (nodes, layer.get("agents")):
        for entry in group.values() if isinstance(group, dict) else ():
            if isinstance(entry, dict):
                for key in ("prompt", *(("config",) if entry.get("type") == "subgraph" else ())):
                    if key in entry:
                        at(entry, key)


# --- merging ----------------------------------------------------------------------------------------------------------


def _matches(path: Key, patterns: tuple[Key, ...]) -> bool:
    return any(len(p) == len(path) and all(a in ("*", b) for a, b in zip(p, path, strict=True)) for p in patterns)


def _new_graph(raw: dict[str, Any], graph: dict[str, Any], origin: dict[Key, str]) -> None:
    """Clear the parent's nodes and edges where a layer brings a whole graph."""
    edges = graph.get("edges")
    if not isinstance(edges, dict) or not isinstance(raw.get("graph"), dict):
        return
    if "START" in edges or origin.get(("graph", "edges")) == DEFAULT:
        raw["graph"]["edges"] = {}
        if isinstance(graph.get("nodes"), dict):
            raw["graph"]["nodes"] = {}


def _drop_absent(raw: dict[str, Any], origin: Mapping[Key, str], label: str) -> None:
    """Drop what parents and defaults say of agents that this graph does not have; what it says itself is checked."""
    graph, rewards = raw.get("graph"), raw.get("rewards")
    nodes = graph.get("nodes") if isinstance(graph, dict) else None
    if not isinstance(nodes, dict):
        return
    process = rewards.get("process") if isinstance(rewards, dict) else None
    for path, entries in ((("rewards", "process"), process), (("agents",), raw.get("agents"))):
        if not isinstance(entries, dict):
            continue
        for name in list(entries):
            here = (*path, name)
            said = {origin[key] for key in origin if key[: len(here)] == here}
            if name not in nodes and not any(by == label or by.startswith("override ") for by in said):
                del entries[name]


def _merge(into: dict[str, Any], new: Mapping[str, Any], path: Key, label: str, origin: dict[Key, str]) -> None:
    for key, value in new.items():
        at = (*path, key)
        old = into.get(key)
        if value and isinstance(value, dict) and isinstance(old, dict) and not _replaces(at, old, value):
            if at == ("graph", "edges"):
                origin[at] = label
            _merge(old, value, at, label, origin)
        elif value is None and not any(_matches(at[: len(p)], (p,)) and len(at) > len(p) for p in RAW):
            into.pop(key, None)  # back to the default, or removed
        else:
            into[key] = value
            origin[at] = label


def _replaces(at: Key, old: dict[str, Any], new: dict[str, Any]) -> bool:
    if at == ("data",):
        return ("world" in old) != ("world" in new)
    if at == ("index",) or _matches(at, (("graph", "nodes", "*"),)):
        return "type" in new and new["type"] != old.get("type", "bm25" if at == ("index",) else None)
    return _matches(at, WHOLE)


def _set(raw: dict[str, Any], origin: dict[Key, str], override: str) -> None:
    """Apply one `a.b=c`: the value is YAML, numbers of the path index lists, and null gives the default back."""
    name, found, text = override.partition("=")
    label = f"override {override!r}"
    path = name.strip().split(".")
    if not found or not all(path):
        raise ConfigError(
            f"{label}: got no `key=value`, expected one such as marl.updates=10; write it without spaces."
        )
    value = _yaml(text, label)
    holder: Any = raw
    for i, part in enumerate(path):
        last = i == len(path) - 1
        at = tuple(path[: i + 1])
        if isinstance(holder, list):
            if not part.isdigit() or int(part) >= len(holder):
                raise ConfigError(
                    f"{label}: got {part!r} in {'.'.join(path[:i])}, expected a number below {len(holder)}; correct it."
                )
            if last:
                holder[int(part)] = value
            holder = holder[int(part)]
        elif not isinstance(holder, dict):
            raise ConfigError(
                f"{label}: got {_show(holder)} at {'.'.join(path[:i])}, expected a mapping that can hold {part!r}; "
                f"shorten the key."
            )
        elif last:
            if value is None and not any(_matches(at[: len(p)], (p,)) and len(at) > len(p) for p in RAW):
                holder.pop(part, None)
            else:
                holder[part] = value
        else:
            holder = holder.setdefault(part, {})
        origin[at] = label if last else origin.get(at, label)


def _yaml(text: str, label: str) -> Any:
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as e:
        line = f", line {e.problem_mark.line + 1}" if e.problem_mark is not None else ""
        problem = e.problem or e.context or "broken YAML"
        told = (
            problem if problem.startswith("got ") else f"got YAML that cannot be read ({problem}), expected valid YAML"
        )
        raise ConfigError(f"{label}{line}: {told}; check quotes, brackets and indentation.") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{label}: got YAML that cannot be read ({e}), expected valid YAML; save it as text.") from e
    except RecursionError as e:
        raise ConfigError(f"{label}: got YAML nested too deep, expected a plain config; flatten it.") from e
    except ValueError as e:  # an integer of thousands of digits
        raise ConfigError(f"{label}: got a value that cannot be read ({e}), expected valid YAML; correct it.") from e
    _check_tree(value, label)
    return value


# --- checking ---------------------------------------------------------------------------------------------------------


def _parse(model: type[Config], raw: dict[str, Any], origin: Mapping[Key, str], label: str) -> Config:
    try:
        return model.model_validate(raw)
    except ValidationError as e:
        told = [_told(model, error, origin, label) for error in e.errors()]
        raise ConfigError("\n".join(dict.fromkeys(told))) from e


def _told(model: type[BaseModel], error: Any, origin: Mapping[Key, str], label: str) -> str:
    loc: Key = tuple(error["loc"])
    where = next((origin[loc[:i]] for i in range(len(loc), 0, -1) if loc[:i] in origin), label)
    where = label if where == DEFAULT else where
    key = ".".join(str(part) for part in loc if part != "[key]") or "config"
    if error["type"] == "extra_forbidden":
        known = _fields(model, loc[:-1])
        return (
            f"{where}: {key}: got an unknown key, expected one of {', '.join(known)}; "
            f"correct or remove it.{nearest(str(loc[-1]), known)}"
        )
    expected = str(error["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", expected)
        expected += "." + nearest(str(error["input"]), choices) if nearest(str(error["input"]), choices) else ""
    return f"{where}: {key}: got {_show(error['input'])}, expected {expected}"


def _fields(model: Any, loc: Key) -> list[str]:
    """Return the keys that are legal at `loc`."""
    here: Any = model
    for part in loc:
        if isinstance(here, type) and issubclass(here, BaseModel):
            here = here.model_fields[str(part)].annotation
            models = [a for a in typing.get_args(here) if isinstance(a, type) and issubclass(a, BaseModel)]
            if models and typing.get_origin(here) not in (dict, list):  # Model | None
                here = models[0]
        else:
            here = typing.get_args(here)[1]  # dict[str, Model]
    return [*here.model_fields, *(() if loc else ("extends",))]


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
