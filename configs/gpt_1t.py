"""A GPT of a trillion parameters (Narayanan et al. 2021, table 1), for 3,072 GPUs: 8-way tensor and
64-way pipeline parallelism, data 6.

A stage has two layers, each a chunk of its own. The vocabulary is Megatron's, GPT-2's padded to
51,200; to use it, name a tokenizers file: `--config.data.tokenizer=tokenizer.json`.
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
            layers=128,
            width=25600,
            heads=160,
            vocab_size=51200,
            norm="layernorm",
            activation="gelu",
            positions="learned",
            tied_embeddings=True,
            biases=("qkv", "out", "mlp", "norm"),
        ),
        data=DataConfig(sequence_length=2048, batch_size=3072),
        mesh=MeshConfig(data=-1, stage=64, model=8),
        pipeline=PipelineConfig(schedule="interleaved", microbatches=512, repeats=2),
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=100),
        train=TrainConfig(steps=72_000, eval_every=1000),  # 450 billion tokens
        checkpoint=CheckpointConfig(every=100),
    )
