"""The one error of a benchmark that cannot go on."""

from castline.engines.errors import CastlineError


class BenchError(CastlineError):
    """The run cannot start; the message says what was found and the cure. Failed requests are figures, not errors."""
