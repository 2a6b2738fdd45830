"""Colours of the page, for light and for dark screens.

Figures are made in the light colours. The page's script exchanges each for its dark one where the reader prefers that,
so no light colour stands for two things.
"""

LIGHT_AND_DARK = {
    "paper": ("#ffffff", "#0d1117"),
    "panel": ("#f6f8fa", "#161b22"),
    "border": ("#d1d9e0", "#30363d"),
    "text": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "lane": ("#f0f3f6", "#1a2029"),
    "grid": ("#dde3e9", "#2a313a"),
    "label": ("#fefefe", "#0b0f14"),
    "accent": ("#0a58ca", "#79b8ff"),
    "dense": ("#2166ac", "#6ba7e5"),
    "lookup": ("#b35806", "#eba35e"),
    "exchange": ("#1b7837", "#63c087"),
    "update": ("#762a83", "#c392d6"),
    "reduce": ("#5d6873", "#97a2ae"),
    "other": ("#858f9a", "#77828e"),
    "run0": ("#3a6fb5", "#7db0ee"),
    "run1": ("#c4560f", "#f3a26c"),
    "run2": ("#25865a", "#6fcf9f"),
    "run3": ("#8a4aa6", "#cb9ae4"),
    "run4": ("#9a7209", "#ddb95f"),
    "run5": ("#b3335f", "#f08bab"),
}
NUM_RUN_COLOURS = 6


def light(name: str) -> str:
    """Returns the colour of a thing on a light page."""
    return LIGHT_AND_DARK[name][0]


def run_colour(number: int) -> str:
    """Returns the light colour of a run, by its place in the report."""
    return light(f"run{number % NUM_RUN_COLOURS}")


def dark_by_light() -> dict[str, str]:
    """Returns the dark colour for each light one."""
    return dict(LIGHT_AND_DARK.values())


def css_variables() -> str:
    """Returns rules that define every colour as a variable of the page's style."""
    by_scheme = (
        "".join(f"  --{name}: {shades[scheme]};\n" for name, shades in LIGHT_AND_DARK.items()) for scheme in (0, 1)
    )
    light_rules, dark_rules = by_scheme
    return f":root {{\n{light_rules}}}\n@media (prefers-color-scheme: dark) {{\n:root {{\n{dark_rules}}}\n}}\n"
