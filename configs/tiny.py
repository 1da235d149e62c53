"""A small model on real text, on a data × stage × model mesh: what `scripts/train.sh` trains. Some
minutes on two cores."""

from jaxtrain.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        model=ModelConfig(layers=8, width=128, heads=4, mlp_width=384, tied_embeddings=True),
        data=DataConfig(sequence_length=128, batch_size=16),
        mesh=MeshConfig(data=-1, stage=2, model=2),
        pipeline=PipelineConfig(schedule="interleaved", microbatches=4, repeats=2),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        precision=PrecisionConfig(compute="float32"),
        train=TrainConfig(steps=150, eval_every=50, sample_prompt="def ", sample_tokens=120),
    )
