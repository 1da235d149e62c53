"""A small twin of mixtral_8x7b.py, on data × stage × expert: top-2 of 8 experts by softmax,
grouped-query attention, biases by load."""

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
        model=ModelConfig(
            layers=4,
            width=128,
            heads=4,
            kv_heads=2,
            experts=8,
            expert_width=128,
            balance_rate=0.003,
            balance_loss=0.02,
            rotary_base=1_000_000.0,
        ),
        data=DataConfig(sequence_length=128, batch_size=32),
        mesh=MeshConfig(data=-1, stage=2, expert=2),
        pipeline=PipelineConfig(schedule="interleaved", microbatches=4, repeats=2),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        precision=PrecisionConfig(compute="float32"),
        train=TrainConfig(steps=200, eval_every=50, sample_prompt="def ", sample_tokens=120),
    )
