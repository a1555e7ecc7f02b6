"""What of its steps an engine is to record. Imports nothing heavy: the command line shows these defaults."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from castline.engines.errors import EngineError

DEFAULT_STEPS: Final = 100


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    directory: str
    """Each recording becomes a trace file in it."""
    num_steps: int = DEFAULT_STEPS
    """A recording ends after so many steps."""

    @classmethod
    def into(cls, directory: Path, num_steps: int) -> "ProfileOptions":
        """Creates the directory. Raises EngineError where that, or a file in it, is refused."""
        from tempfile import TemporaryFile  # here: few starts want a profile

        try:
            directory.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=directory).close()
        except OSError as error:
            raise EngineError(f"cannot write profiles into {directory}: {error.strerror}") from None
        return cls(str(directory), num_steps)
