"""tiny.py by two replicas that train apart and exchange every 20 steps (DiLoCo).

A replica has half the batch, and so noisier gradients: the warm-up is longer and Adam's second
moment slower than tiny.py's. Ten exchanges are too few for an outer momentum to pay.
"""

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
        mesh=MeshConfig(replica=2, data=-1, stage=2),
        pipeline=PipelineConfig(schedule="interleaved", microbatches=4, repeats=2),
        optimizer=OptimizerConfig(
            learning_rate=3e-3,
            warmup_steps=60,
            b2=0.99,
            outer_learning_rate=1.0,
            outer_momentum=0.0,
        ),
        precision=PrecisionConfig(compute="float32"),
        train=TrainConfig(
            steps=200, diloco_inner_steps=20, eval_every=50, sample_prompt="def ", sample_tokens=120
        ),
    )
