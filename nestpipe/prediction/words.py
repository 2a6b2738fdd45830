"""What limits a step whose exchange stays exposed, and what would help, in words."""

SHORT = 0.05
"""Share of a step below which exposed exchange is not worth a remedy."""
REMEDIES = (
    'a larger batch, exchange.hosts = "auto" if hosts have several ranks that share keys, exchange.row_dtype = '
    '"bfloat16" with exchange.gradient_dtype = "bfloat16", or a faster network'
)


def shortage(dense_ms: float, exchange_ms: float, exposed_ms: float, step_ms: float) -> str:
    """Returns a sentence if dense compute is too short to cover the exchange of a batch; else an empty string."""
    if exposed_ms < SHORT * step_ms or dense_ms >= exchange_ms:
        return ""
    return f"Dense compute of {dense_ms:.1f} ms cannot cover {exchange_ms:.1f} ms of exchange: take {REMEDIES}"
