"""A DLRM learns the synthetic click log: data, tables, model and metrics together.

Fails, for example, if Batches hands out the same samples again and again, if DLRM leaves the embeddings out of the top
layers, or if ClickData draws its clicks from other keys than it shows.
"""

import torch

import nestpipe
from nestpipe.data.dataset import Batches
from nestpipe.data.synthetic.clicks import ClickData
from nestpipe.evaluation.clicks import auc, normalised_entropy
from nestpipe.models import DLRM

DIM = 8


def test_learns_most_of_what_can_be_known() -> None:
    data = ClickData(seed=1, scale=0.01)
    row_optimizer = nestpipe.optim.Adagrad(lr=0.1)
    features = {
        name: nestpipe.Pooled(nestpipe.Table(name, DIM, optimizer=row_optimizer)) for name in data.feature_names
    }
    model = DLRM(13, data.feature_names, DIM, bottom=(32,), top=(64,))
    trainer = nestpipe.Trainer(model, features, dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 3e-3))
    trainer.fit(Batches(data, 1024), steps=30)

    unseen = ClickData(seed=2, scale=0.01).samples(0, 10_000)
    rows = {name: trainer.store.gather(name, unseen.keys[name].values)[0][:, :DIM] for name in features}
    with torch.no_grad():
        logits = model.predict(rows, unseen.inputs)
    click, best = unseen.inputs["click"], auc(unseen.inputs["click_probability"], unseen.inputs["click"])
    # The dense features alone give 0.63.
    assert auc(logits, click) - 0.5 > 0.6 * (best - 0.5)
    assert normalised_entropy(logits, click) < 0.93
