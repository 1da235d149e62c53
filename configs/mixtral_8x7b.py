"""Mixtral 8x7B (Jiang et al. 2024): 8 experts of which a token takes 2, grouped-query attention;
46.7 billion parameters, 12.9 active.

The vocabulary is Mixtral's: name its tokenizers file, `--config.data.tokenizer=tokenizer.json`. An
expert for each GPU of a node, and four stages: it fits 32 devices of 80 GB, each with one sequence
of a microbatch and room for twice the mean number of rows. Tokens travel to the experts and back
beside products of another microbatch. How it was trained is not published, so data, learning rate
and steps are a start. Its small twin: mixtral_tiny.py.
"""

from jaxtrain.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
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
            experts=8,
            experts_per_token=2,
            expert_width=14336,
            expert_room=2.0,
            router_bias=False,
            balance_loss=0.02,
            balance_rate=0.0,
            vocab_size=32000,
            rotary_base=1_000_000.0,
        ),
        data=DataConfig(sequence_length=8192, batch_size=512, attend_across_documents=False),
        mesh=MeshConfig(data=-1, stage=4, expert=8),
        parallel=ParallelConfig(zero=1),
        pipeline=PipelineConfig(
            schedule="interleaved",
            repeats=2,
            microbatches=64,
            overlap=True,
            save=("layer_input",),
        ),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        train=TrainConfig(steps=250_000, eval_every=1000),
        checkpoint=CheckpointConfig(every=500),
    )
