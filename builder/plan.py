"""What is to be built, once the checkpoint is known, and the manifest that says what was."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from castline import __version__
from castline.builder.autotune import TuningChoices
from castline.builder.options import BuildOptions
from castline.builder.recipes import Recipe
from castline.builder.tool_versions import tool_versions
from castline.engines.capacity import kv_block_bytes
from castline.engines.errors import BuildError
from castline.engines.host import detect_host
from castline.engines.manifest import SCHEMA_VERSION, Host, Limits, Manifest, ModelFacts, Parity, Precision
from castline.engines.repository import MODEL_NAME_RULE, is_model_name
from castline.plugins.cpu.library import describe


@dataclass(frozen=True, slots=True)
class Plan:
    """The options, with everything that model and host decide filled in."""

    options: BuildOptions
    recipe: Recipe
    facts: ModelFacts
    precision: Precision
    max_model_len: int
    host: Host

    def limits(self, block_size: int) -> Limits:
        options = self.options
        return Limits(self.max_model_len, block_size, options.max_num_seqs, options.max_num_batched_tokens)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block of one layer."""
        return kv_block_bytes(self.facts.num_kv_heads, self.facts.head_dim, block_size, self.precision.kv_dtype)


def make_plan(options: BuildOptions, facts: ModelFacts, recipe: Recipe) -> Plan:
    """Raises BuildError where the model cannot give what was asked."""
    name = options.name or facts.name
    if not is_model_name(name):
        raise BuildError(f"the engine cannot be called {name!r}, as MODEL is: give a --name of {MODEL_NAME_RULE}")
    return Plan(
        options=options,
        recipe=recipe,
        facts=replace(facts, name=name),
        precision=Precision(recipe.name, options.resolved_kv_dtype),
        max_model_len=options.resolve_max_model_len(facts.max_position),
        host=detect_host(options.target),
    )


def make_manifest(plan: Plan, choices: TuningChoices, parity: Parity | None, graph_file: str) -> Manifest:
    """The manifest of a finished engine; writing the bundle fills in its files."""
    return Manifest(
        schema_version=SCHEMA_VERSION,
        castline_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        rebuild_command=plan.options.rebuild_command(),
        model=plan.facts,
        precision=plan.precision,
        limits=plan.limits(choices.block_size),
        host=plan.host,
        tuning=choices.manifest(),
        parity=parity,
        plugin=describe(),
        graph_file=graph_file,
        tool_versions=tool_versions(),
        files={},
    )
