"""Reads a configuration file; whatever is wrong with it becomes one line."""

import difflib
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from .config import (
    ClipRuleConfig,
    Config,
    DynamicConfig,
    GptConfig,
    ManualConfig,
    MnistConfig,
    MonitorConfig,
    OptimizationConfig,
    OptimizerConfig,
    PhaseConfig,
    ResNetConfig,
    RunConfig,
    Section,
)


class ConfigError(Exception):
    """The configuration is wrong; the message is one line that names the key."""


class _Loader(yaml.SafeLoader):
    """Safe, and refuses a key that is given twice, of which YAML takes the last."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def load(path: str, overrides: list[str] = ()) -> Config:
    """Reads a configuration.

    Args:
      path: of the YAML file.
      overrides: `key=value` each, the key with dots (`run.seed=1`), the value as YAML.

    Raises:
      ConfigError: if the file cannot be read or says something wrong, in one line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            given = yaml.load(file, _Loader)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}.") from e
    except (yaml.YAMLError, ValueError) as e:  # the latter for 2024-13-01
        raise ConfigError(f"{path}: is not YAML: {_one_line(e)}.") from e
    if not isinstance(given, dict):
        allowed = ", ".join(Config.model_fields)
        raise ConfigError(f"{path}: expected sections {allowed}; got {given!r}.")
    for override in overrides:
        _set(given, override)
    try:
        return Config(**given)
    except (ValidationError, TypeError) as e:
        raise ConfigError(f"{path}: {_explain(e, given)}") from e


# What pydantic says, and what is plainer.
_WORDS = {
    "Input should be": "must be",
    "String should": "must",
    "Tuple should": "must",
    " a valid tuple": " a list",
    " after validation, not": ", not",
}


def _set(given: dict, override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not last:
        raise ConfigError(f"--set {override}: expected key=value, as in run.seed=1.")
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as e:
        raise ConfigError(f"--set {override}: is not YAML: {_one_line(e)}.") from e
    for section in sections:
        given = given.setdefault(section, {})
        if not isinstance(given, dict):
            raise ConfigError(f"--set {override}: {section} is not a section.")
    given[last] = value


def _explain(error: Exception, given: dict) -> str:
    """The first fault as one line: the key, what is allowed, what was given."""
    if isinstance(error, TypeError):  # a key of the outermost level that is no string
        return "keys must be words; quote those that are not."
    fault = error.errors()[0]
    # Pydantic puts the chosen member of a union into the path: data.mnist.shift.
    path, at = [], given
    for part in fault["loc"]:
        if isinstance(at, dict) and part not in at and at.get("name") == part:
            continue
        path.append(str(part))
        at = _child(at, part)
    key = ".".join(path) or "configuration"
    if fault["type"] == "extra_forbidden":
        allowed = _allowed(path[:-1], given)
        near = difflib.get_close_matches(path[-1], allowed, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{key}: unknown key.{hint} Allowed: {', '.join(allowed)}."
    if fault["type"] == "missing":
        return f"{key}: is missing."
    if fault["type"] == "union_tag_not_found":
        return f"{key}.name: is missing; expected {fault['ctx']['discriminator']}."
    if fault["type"] == "union_tag_invalid":
        tags = fault["ctx"]["expected_tags"]
        return f"{key}.name: expected {tags}; got {fault['ctx']['tag']!r}."
    if fault["type"] in ("model_type", "model_attributes_type"):
        return f"{key}: must be a section with keys; got {fault['input']!r}."
    message = _one_line(fault["msg"]).removeprefix("Value error, ").rstrip(".")
    for wording, ours in _WORDS.items():
        message = message.replace(wording, ours)
    # Keys of a section that was validated on its own: `DynamicLossScale: max ...`.
    if isinstance(fault["input"], dict | Section):
        return f"{key}: {message}."
    shown = "" if "got " in message else f"; got {fault['input']!r}"
    return f"{key}: {message}{shown}."


def _child(at: Any, part: Any) -> Any:
    try:
        return at[part]
    except (KeyError, IndexError, TypeError):
        return None


def _allowed(path: list[str], given: dict) -> list[str]:
    """The keys of the section at a path."""
    sections = {
        (): Config,
        ("run",): RunConfig,
        ("optimizer",): OptimizerConfig,
        ("optimization",): OptimizationConfig,
        ("optimization", "loss_scale"): DynamicConfig,
        ("optimization", "clip_rules"): ClipRuleConfig,
        ("optimization", "phases"): PhaseConfig,
        ("optimization", "phases", "loss_scale"): DynamicConfig,
        ("monitor",): MonitorConfig,
        ("data",): MnistConfig,
        ("model",): ResNetConfig,
    }
    # The number of an item of a list is not part of the kind of section.
    section = sections[tuple(part for part in path if not part.isdecimal())]
    named = {c.model_fields["name"].annotation: c for c in (ManualConfig, GptConfig)}
    name = given[path[0]].get("name") if path else None
    return list(named.get(Literal[name], section).model_fields)


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())
