"""What a search ranks models by: their accuracy, or their loss (SuperFedNAS, Eq. 6)."""

from fedloom.platform.settings import OneOf

METRICS = OneOf(("accuracy", "loss"))
METRIC_TEXT = "models are ranked by accuracy, or by loss (of texts, the logarithm of perplexity)"


def merit(metric: str, accuracy: float, loss: float) -> float:
    """The value that a search maximises: the accuracy, or the loss with its sign changed."""
    return accuracy if metric == "accuracy" else -loss


def in_unit(metric: str, value: float) -> float:
    """A merit in the unit of its metric."""
    return value if metric == "accuracy" else -value
