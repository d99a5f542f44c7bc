"""Forecasting packages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from comparison import Example


def pytorch_forecasting(network: str = "RecurrentNetwork") -> Example:
    """A network of pytorch-forecasting on made series."""
    import pandas as pd
    import pytorch_forecasting as package
    from pytorch_forecasting.data import NaNLabelEncoder

    drawn = np.random.default_rng(0)
    frame = pd.DataFrame(
        [
            {"time": t, "series": name, "value": np.sin(t / 5 + place) + drawn.normal() / 10 + 3}
            for place, name in enumerate("abcd")
            for t in range(60)
        ]
    )
    own = {"time_varying_known_reals": ["time"]} if network == "TemporalFusionTransformer" else {}
    dataset = package.TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        categorical_encoders={"series": NaNLabelEncoder().fit(frame.series)},
        min_encoder_length=4,
        max_encoder_length=24,
        max_prediction_length=6,
        time_varying_unknown_reals=["value"],
        static_categoricals=["series"],
        randomize_length=True,
        **own,
    )
    model = getattr(package, network).from_dataset(dataset, dropout=0.0, hidden_size=16)
    loader = dataset.to_dataloader(train=True, batch_size=32, num_workers=0)
    batches = [batch for batch, _ in zip(loader, range(2), strict=False)]

    def loss(model: Any, batch: Any) -> Any:
        x, y = batch
        output = model(x)
        return model.loss(output["prediction"], y), output["prediction"]

    return Example(model, batches, loss)


def deepar() -> Example:
    """DeepAR of pytorch-forecasting."""
    return pytorch_forecasting("DeepAR")


def temporal_fusion() -> Example:
    """The temporal fusion transformer of pytorch-forecasting."""
    return pytorch_forecasting("TemporalFusionTransformer")


def neuralforecast(network: str = "LSTM") -> Example:
    """A network of neuralforecast on made windows."""
    import neuralforecast.models as models
    from neuralforecast.losses.pytorch import MAE

    model = getattr(models, network)(
        h=6, input_size=24, loss=MAE(), encoder_hidden_size=32, decoder_hidden_size=16, max_steps=1
    )
    steps = torch.arange(40.0)
    batches = [
        torch.stack(
            [torch.sin((steps + 7 * place + 3 * part) / 4) for place in range(16)]
        ).unsqueeze(-1)
        for part in range(2)
    ]

    def loss(model: Any, batch: Any) -> Any:
        windows = {"insample_y": batch[:, :24], "insample_mask": torch.ones_like(batch[:, :24, 0])}
        output = model({**windows, "futr_exog": None, "hist_exog": None, "stat_exog": None})
        return (output - batch[:, 24:30]).square().mean(), output

    return Example(model, batches, loss)


def gluonts() -> Example:
    """DeepAR of gluonts, on made series of days."""
    from gluonts.torch.model.deepar.module import DeepARModel

    model = DeepARModel(
        "D", context_length=24, prediction_length=6, lags_seq=[1, 2, 7], dropout_rate=0.0
    )
    past = model._past_length
    batches = []
    for _ in range(2):
        series = torch.rand(16, past + 6) + 1
        batches.append(
            {
                "feat_static_cat": torch.zeros(16, 1, dtype=torch.long),
                "feat_static_real": torch.zeros(16, 1),
                "past_time_feat": torch.rand(16, past, 1),
                "past_target": series[:, :past],
                "past_observed_values": torch.ones(16, past),
                "future_time_feat": torch.rand(16, 6, 1),
                "future_target": series[:, past:],
                "future_observed_values": torch.ones(16, 6),
            }
        )

    def loss(module: Any, batch: Any) -> Any:
        losses = module.loss(**batch)
        return losses.mean(), losses

    return Example(model, batches, loss)


def darts(network: str = "RNNModel") -> Example:
    """A network of darts on a made series."""
    import darts.models
    from darts import TimeSeries

    own = {"training_length": 30} if network == "RNNModel" else {"output_chunk_length": 6}
    model = getattr(darts.models, network)(
        model="LSTM", input_chunk_length=24, hidden_dim=24, random_state=0, **own
    )
    model.trainer_params |= {"enable_progress_bar": False, "logger": False, "accelerator": "cpu"}
    model.fit(TimeSeries.from_values(np.sin(np.arange(120) / 5)), epochs=1)
    batches = [torch.rand(8, 24, 1) for _ in range(2)]

    def loss(module: Any, batch: Any) -> Any:
        output, _ = module.rnn(batch)
        output = module.V(output)
        return (output - 0.5).square().mean(), output

    return Example(model.model, batches, loss)


def pypots() -> Example:
    """M-RNN of pypots on made data with gaps."""
    from pypots.nn.modules.mrnn import BackboneMRNN

    model = BackboneMRNN(20, 5, 24)
    batches = []
    for _ in range(2):
        values, mask = torch.rand(8, 20, 5), (torch.rand(8, 20, 5) > 0.3).float()
        one = {"X": values * mask, "missing_mask": mask, "deltas": torch.ones(8, 20, 5)}
        batches.append(
            {"X": values * mask, "missing_mask": mask, "forward": one, "backward": dict(one)}
        )

    def loss(module: Any, batch: Any) -> Any:
        output = module(batch)
        return sum(part.square().mean() for part in output), list(output)

    # It makes initial states in torch's default dtype.
    return Example(model, batches, loss, dtypes=(torch.float32,))
