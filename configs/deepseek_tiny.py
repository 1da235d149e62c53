"""A small twin of deepseek_v3.py, on data × stage × expert: latent attention, a first layer without
experts, sigmoid router with groups and a shared expert, biases by load, prediction of the token
after the next."""

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
            dense_layers=1,
            width=128,
            heads=4,
            attention="mla",
            head_dim=32,
            rope_head_dim=16,
            query_rank=96,
            kv_rank=64,
            experts=8,
            experts_per_token=2,
            shared_experts=1,
            expert_width=96,
            router="sigmoid",
            router_groups=4,
            router_group_limit=2,
            router_group_best=2,
            router_scale=2.5,
            balance_rate=0.005,
            balance_loss=0.01,
            mtp_depth=1,
            norm_epsilon=1e-6,
            latent_norm_epsilon=1e-6,
        ),
        data=DataConfig(sequence_length=128, batch_size=32),
        mesh=MeshConfig(data=-1, stage=2, expert=2),
        pipeline=PipelineConfig(schedule="dualpipe_v", microbatches=4, remat="selective"),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        precision=PrecisionConfig(compute="float32"),
        train=TrainConfig(steps=200, eval_every=50, sample_prompt="def ", sample_tokens=120),
    )
