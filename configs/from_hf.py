"""Continues to train a published model, with the folder's tokenizer and a small learning rate:

    python -m jaxtrain.train --config=from_hf --config.train.init_from=DIR --workdir=runs/mine

DIR has the model's config.json, its safetensors and its tokenizer.json, or is org/name[@revision]
of the Hugging Face hub. The model's settings come from there; sizes of the mesh, the batch and the
text are for you to choose.
"""

from jaxtrain.config import (
    Config,
    DataConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        data=DataConfig(sequence_length=256, batch_size=16),
        pipeline=PipelineConfig(microbatches=2),
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=10),
        train=TrainConfig(init_from="model", steps=100, eval_every=50),
    )
