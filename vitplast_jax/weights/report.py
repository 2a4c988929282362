"""What did a conversion do, and what did not fit?

In: what `convert.load_tree` found. Out: lines for a reader; one error that holds everything.
"""

import dataclasses

from vitplast_jax.errors import UserError
from vitplast_jax.models import specs


@dataclasses.dataclass
class Report:
    """What a conversion did. `spec`: the model's; `reinitialised`: paths that do not come from the source; `ignored`:
    the source's tensors that carry nothing of the model; `notes`: what else a reader should know."""

    source: str
    container: str
    dialect: str
    spec: specs.ViTSpec
    parameters: int
    wrapper: str | None = None
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    reinitialised: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None

    def lines(self):
        """The report for a reader, a list of lines."""
        spec, told = self.spec, self.spec.preprocessing
        where = (f" under {self.wrapper!r}" if self.wrapper else "") + (
            f", prefix {self.prefix}" if self.prefix else ""
        )
        gated = getattr(spec, "gated", False)
        lines = [
            f"source         {self.source}",
            f"container      {self.container}{where}",
            f"dialect        {self.dialect}",
            f"model          {spec.name}: {spec.depth} blocks of width {spec.width}, {spec.heads} heads, "
            f"hidden {spec.hidden}" + (" (SwiGLU)" if gated else ""),
            *self._inputs(),
            f"numerics       GELU {spec.gelu}, LayerNorm epsilon {spec.eps:g}"
            + (", LayerScale" if getattr(spec, "layer_scale", None) else "")
            + ("" if getattr(spec, "qkv_bias", True) else ", no qkv bias"),
            f"classes        {spec.num_classes}",
            f"parameters     {self.parameters:,}",
        ]
        if isinstance(spec, specs.ViTSpec):
            lines.append(
                "preprocessing  "
                + (
                    f"mean {told.mean}, std {told.std}, {told.interpolation}, crop {told.crop_pct:g}, {told.resize}"
                    if told
                    else "unknown: tell data.mean and data.std before images are read"
                )
            )
        lines += [f"reinitialised  {', '.join(self.reinitialised)}"] if self.reinitialised else []
        lines += [f"ignored        {', '.join(self.ignored)}"] if self.ignored else []
        return lines + [f"note           {note}" for note in self.notes]

    def _inputs(self):
        spec = self.spec
        if isinstance(spec, specs.GPT2Spec):
            return [f"tokens         words of {spec.vocabulary:,}, at most {spec.context} in a sequence, causal"]
        positions = f"table with rows for {spec.pos_prefix} of them" if spec.pos_embed else "no table"
        if spec.rope:
            positions += f", rotary (theta {spec.rope.theta:g}, {spec.rope.dtype}, periods {spec.rope.periods})"
        return [
            f"images         {_by(spec.img_size)}x{spec.in_chans}, patch {_by(spec.patch_size)}",
            f"tokens         {spec.prefix} before the patches ({spec.registers} registers), pooling {spec.pool}",
            f"positions      {positions}",
        ]


def _by(size):
    return "x".join(map(str, size))


@dataclasses.dataclass
class Problems:
    """Everything that does not fit, for one error."""

    missing: list = dataclasses.field(default_factory=list)
    unused: list = dataclasses.field(default_factory=list)
    shapes: list = dataclasses.field(default_factory=list)
    values: list = dataclasses.field(default_factory=list)

    def raise_if_any(self, beginning):
        parts = [
            f"{len(found)} {kind}: {', '.join(found[:5])}{', ...' if len(found) > 5 else ''}"
            for kind, found in (
                ("of wrong shape", self.shapes),
                ("missing", self.missing),
                ("unused", self.unused),
                ("of wrong values", self.values),
            )
            if found
        ]
        if parts:
            raise UserError(f"{beginning}: {'; '.join(parts)}")
