"""Llama 3 8B (Grattafiori et al. 2024): grouped-query attention, SwiGLU, rotary positions of base
500,000, sequences of 8192.

The vocabulary is Llama 3's; to use it, name its tokenizers file:
`--config.data.tokenizer=tokenizer.json`. Tensor parallelism over the 8 GPUs of a node holds 12
bytes of parameters and optimizer state a parameter in 12 GB of each, before ZeRO.
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
            layers=32,
            width=4096,
            heads=32,
            kv_heads=8,
            mlp_width=14336,
            vocab_size=128256,
            rotary_base=500_000.0,
        ),
        data=DataConfig(sequence_length=8192, batch_size=512, attend_across_documents=False),
        mesh=MeshConfig(data=-1, model=8),
        pipeline=PipelineConfig(microbatches=8),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        train=TrainConfig(steps=250_000, eval_every=1000),  # a trillion tokens
        checkpoint=CheckpointConfig(every=500),
    )
