"""GPT-3 175B (Brown et al. 2020), for 128 GPUs and their multiples: 8-way tensor and 16-way
pipeline parallelism.

16 stages of 3 chunks of 2 layers. The vocabulary is GPT-2's; to use it, name a tokenizers file:
`--config.data.tokenizer=tokenizer.json`.
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
            layers=96,
            width=12288,
            heads=96,
            vocab_size=50257,
            norm="layernorm",
            activation="gelu",
            positions="learned",
            tied_embeddings=True,
            biases=("qkv", "out", "mlp", "norm"),
        ),
        data=DataConfig(sequence_length=2048, batch_size=1536),
        mesh=MeshConfig(data=-1, stage=16, model=8),
        pipeline=PipelineConfig(schedule="interleaved", microbatches=96, repeats=3),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=120),
        train=TrainConfig(steps=95_000, eval_every=1000),  # 300 billion tokens
        checkpoint=CheckpointConfig(every=200),
    )
