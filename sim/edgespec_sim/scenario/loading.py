"""Scenario files: found by name or path, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgespec.config.loading import ConfigError, load_config
from edgespec_sim.scenario.sections import Scenario

# In a checkout the scenarios lie beside the package, in an installation within it.
_FOLDERS = (Path(__file__).parents[1] / "scenarios", Path(__file__).parents[2] / "scenarios")


def bundled_scenarios() -> dict[str, Path]:
    """Files of the scenarios that come with the simulator, by name."""
    return {
        path.stem: path
        for folder in _FOLDERS
        if folder.is_dir()
        for path in sorted(folder.glob("*.yaml"))
    }


def scenario_path(name: str) -> Path:
    """Raises ``ConfigError`` that names the bundled scenarios."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    bundled = bundled_scenarios()
    if name not in bundled:
        raise ConfigError(f"no scenario {name!r}: not a YAML file, nor one of {', '.join(bundled)}")
    return bundled[name]


def load_scenario(name: str, overrides: Mapping[str, object] | None = None) -> Scenario:
    """Raises ``ConfigError``: what is wrong, where, and what would be right."""
    return load_config(Scenario, scenario_path(name), overrides)
