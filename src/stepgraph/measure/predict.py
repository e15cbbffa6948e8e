"""The host's budget for a decode step, by arithmetic alone: no GPU is needed, and nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass

from stepgraph.engine.config import ModelConfig
from stepgraph.measure.cards import Card
from stepgraph.measure.result import Figure, Result
from stepgraph.measure.work import weight_bytes
from stepgraph.runtime.errors import ConfigError

LAYER_LAUNCHES = 10
AROUND = (
    "embedding",
    "final norm",
    "LM head",
    "temperature",
    "penalties",
    "top-k",
    "top-p",
    "softmax",
    "draw",
    "gather",
)
ALL_REDUCES = 2
_ROUNDED_TO = 5  # "about 395"
_ITEMSIZE = 2  # bfloat16

CAVEATS = (
    "This holds a submission estimate against a lower bound on reading weights, not against the GPU's whole work: "
    "collectives, attention, the kernels' efficiency and waits come on top. So it proves neither that a step is bound "
    "by launching nor that the GPU idles; a critical path on the GPU that is longer than the submission hides it.",
    "Nor is the time of an empty kernel a price that every kernel pays on top. Measure eager and graph under the same "
    "capture boundary and inputs: `stepgraph account` on a GPU.",
)


@dataclass(frozen=True)
class Prediction:
    """A decode step of one row on `tp` GPUs.

    read_bytes: of weights, on each. gpu_us: they at the card's bandwidth. launches: in a step, on each.
    """

    read_bytes: float
    gpu_us: float
    launches: int

    @property
    def host_budget_us(self) -> float:
        """B_host = T_GPU / N_kernels."""
        return self.gpu_us / self.launches

    @property
    def about(self) -> int:
        """The launches as they are usually given, to the nearest five."""
        return _ROUNDED_TO * round(self.launches / _ROUNDED_TO)

    def submission_us(self, launch_us: float) -> float:
        """Host time for all launches of a step."""
        return self.about * launch_us


def predict(config: ModelConfig, card: Card, tp: int) -> Prediction:
    """Of the model in bfloat16.

    Raises:
        ConfigError: heads that cannot be shared out among so many GPUs.
    """
    if tp < 1 or config.num_heads % tp:
        raise ConfigError(f"tp {tp}: it must be at least 1 and divide the model's {config.num_heads} heads")
    a_layer = LAYER_LAUNCHES + (ALL_REDUCES if tp > 1 else 0)
    read = weight_bytes(config, _ITEMSIZE) / tp
    return Prediction(read, read / card.read * 1e6, a_layer * config.num_layers + len(AROUND))


def prediction_result(model: str, config: ModelConfig, card: Card, tp: int) -> Result:
    """Figures with their definitions. Raises ConfigError as `predict`."""
    found = predict(config, card, tp)
    reduces = f" and {ALL_REDUCES} all-reduces" if tp > 1 else ""
    ms = found.gpu_us / 1e3
    figures = [
        Figure.of(
            "weights read",
            found.read_bytes / 1e9,
            "GB",
            f"every weight but the input embedding, once, bfloat16, over {tp} GPU{'s' if tp > 1 else ''}",
        ),
        Figure.of("T_GPU", ms, "ms", f"the same over {card.read / 1e12:.2f} TB/s, the data sheet's bandwidth"),
        Figure.of(
            "N_kernels",
            found.launches,
            "launches",
            f"{LAYER_LAUNCHES} a layer{reduces}, and {len(AROUND)} around the layers: {', '.join(AROUND)}",
        ),
        Figure.of("B_host", found.host_budget_us, "µs", "host budget for each kernel: T_GPU / N_kernels"),
    ]
    notes = [f"T_GPU {ms:.2f} ms / {found.launches} launches = {_us(found.host_budget_us)} of the host for each."]
    for launch in card.launches:
        spent, who = found.submission_us(launch.us) / 1e3, launch.source.split(",")[0]
        what = f"host time of all launches: {found.about}, N_kernels to the nearest {_ROUNDED_TO}, times the above"
        figures += [
            Figure.of(f"launch, {who}", launch.us, "µs", f"{launch.gpu}: {launch.definition}; {launch.source}"),
            Figure.of(f"submission, {who}", spent, "ms", what),
        ]
        over = "more" if spent > ms else "less"
        notes.append(f"{found.about} × {launch.us:.2f} µs = {spent:.2f} ms of submission ({who}), {over} than T_GPU.")
    return Result(
        name="account_predict",
        definition=f"One decode step of {model}, one row, on {tp} × {card.name}: arithmetic from data sheets and "
        "published launch costs, nothing measured here.",
        figures=figures,
        notes=[*notes, *CAVEATS],
    )


def _us(us: float) -> str:
    return f"{us:.1f} µs" if us >= 10 else f"{us:.2f} µs"
