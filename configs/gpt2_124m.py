"""GPT-2 small (Radford et al. 2019), with the training settings of GPT-3's smallest model: half a
million tokens a step.

The vocabulary is GPT-2's; to use it, name a tokenizers file:
`--config.data.tokenizer=tokenizer.json`. With the default, bytes, the model trains as well, on ids
below 257 of its vocabulary.
"""

from jaxtrain.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            layers=12,
            width=768,
            heads=12,
            vocab_size=50257,
            norm="layernorm",
            activation="gelu",
            positions="learned",
            tied_embeddings=True,
            biases=("qkv", "out", "mlp", "norm"),
        ),
        data=DataConfig(sequence_length=1024, batch_size=512),
        mesh=MeshConfig(data=-1),
        pipeline=PipelineConfig(microbatches=8),
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=700),
        train=TrainConfig(steps=19_000, eval_every=1000),  # 10 billion tokens
        checkpoint=CheckpointConfig(every=1000),
    )
