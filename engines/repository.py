"""Finding engines: ``<repository>/<model>/<version>/``, Triton's layout. Imports nothing heavy: a start begins here."""

import json
import re
from pathlib import Path
from typing import Any

from castline.engines.errors import EngineError

MANIFEST_NAME = "engine.json"
MODEL_NAME_RULE = "1 to 128 letters, digits, '.', '_' and '-', beginning with a letter or digit"
MAX_VERSION = 999_999_999

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION_NAME = re.compile(r"[1-9][0-9]{0,8}")


def find_bundle(repository: Path, model: str | None = None, version: int | None = None) -> Path:
    """The bundle to serve: that of *model*, or of the only model there is; *version*, or the latest.

    *repository* may also be one model's directory, or a bundle itself. Raises EngineError listing what there is.
    """
    if not repository.is_dir():
        raise EngineError(f"{repository} is not a directory; give the --output of `castline build`")
    if (repository / MANIFEST_NAME).is_file():
        if model is not None or version is not None:
            raise EngineError(f"{repository} is one engine: leave out model and version, or give its repository")
        return repository
    is_home = model is None and bool(bundle_versions(repository))
    home = repository if is_home else repository / _pick_model(repository, model)
    versions = bundle_versions(home)
    if version is None:
        return home / str(versions[-1])
    if version not in versions:
        raise EngineError(f"{home} has no version {version}; it has {', '.join(map(str, versions))}")
    return home / str(version)


def bundle_models(repository: Path) -> list[str]:
    """Models of a repository that have a version, sorted."""
    names = (entry.name for entry in repository.iterdir() if entry.is_dir())
    return sorted(name for name in names if _MODEL_NAME.fullmatch(name) and bundle_versions(repository / name))


def bundle_versions(home: Path) -> list[int]:
    """Versions of one model's directory that hold a manifest, ascending."""
    return [version for version in version_numbers(home) if (home / str(version) / MANIFEST_NAME).is_file()]


def read_target(bundle: Path) -> Any:
    """What a bundle says it is for; None where that cannot be read: `castline.engines.manifest` says why."""
    try:
        return json.loads((bundle / MANIFEST_NAME).read_bytes())["host"]["target"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def is_version(version: int) -> bool:
    """Whether *version* can name a directory of a model."""
    return _VERSION_NAME.fullmatch(str(version)) is not None


def is_model_name(model: str) -> bool:
    """Whether *model* can name a directory of a repository."""
    return _MODEL_NAME.fullmatch(model) is not None


def check_model_name(model: str) -> None:
    """Raises EngineError unless *model* can name a directory of a repository."""
    if not is_model_name(model):
        raise EngineError(f"model name {model!r} is not valid: it takes {MODEL_NAME_RULE}")


def _pick_model(repository: Path, model: str | None) -> str:
    models = bundle_models(repository)
    listing = f"it has {', '.join(models)}" if models else "it has none; make one with `castline build`"
    if model is None:
        if len(models) != 1:
            raise EngineError(f"{repository} does not have exactly one model: name one with --model ({listing})")
        return models[0]
    check_model_name(model)
    if model not in models:
        raise EngineError(f"{repository} has no engine of model {model!r}; {listing}")
    return model


def version_numbers(home: Path) -> list[int]:
    """Versions of one model's directory, whatever they hold, ascending."""
    if not home.is_dir():
        return []
    return sorted(int(entry.name) for entry in home.iterdir() if _VERSION_NAME.fullmatch(entry.name))
