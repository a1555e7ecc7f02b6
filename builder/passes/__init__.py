"""Graph passes: each takes the ONNX graph one step on, in place, and returns how often it matched.

`run_passes` runs them in order. Dead code goes after each, so that the nodes before and after tell what a pass saved.
"""

from castline.builder.passes.pipeline import PassReport, run_passes

__all__ = ["PassReport", "run_passes"]
