"""Recipe keys that set options of the pipeline.

Fails if a key loses its `option`, so that the recipe's value would be ignored.
"""

from dataclasses import fields

from nestpipe import PipelineOptions
from nestpipe.recipe.config import Config
from nestpipe.recipe.text import load_config

WITHOUT_A_KEY = {"clustering", "late_gradients"}
"""[cluster] describes the first one; the second is for loops that read Step.gradients."""


def test_every_option_has_a_key() -> None:
    assert Config().pipeline_options().keys() | WITHOUT_A_KEY == {field.name for field in fields(PipelineOptions)}


def test_values_reach_the_options() -> None:
    settings = ("pipeline.schedule=inter", "exchange.window=resend", "train.seed=7", "store.num_threads=3")
    options = PipelineOptions(**load_config(None, settings).pipeline_options())
    assert (options.schedule, options.window, options.seed, options.num_threads) == ("inter", "resend", 7, 3)
