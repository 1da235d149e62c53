"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437, section 4.2): 671 billion parameters, 37 of them
active, and 11.6 more that predict one token further.

Latent attention; 256 experts in 8 groups, of which a token takes 8 in 4, beside a shared one; the
first three layers have none. As there, over 2,048 GPUs: 16 stages, experts over 64 devices in 8
nodes, to each of which a token is sent once, ZeRO-1, no tensor parallelism, and an optimizer with
float32 masters and 16-bit moments. The stages with the dense layers, the prediction module and the
head have fewer other layers; what these need is sharded over a stage's devices. What differs:
theirs had DualPipe and FP8; here the table is 1F1B, in which a forward and a backward of two
microbatches share a cell, and layers are computed again from their inputs. The vocabulary is
DeepSeek-V3's: name its tokenizers file, `--config.data.tokenizer=tokenizer.json`. Its small twin:
deepseek_tiny.py.
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
    PrecisionConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            layers=58,
            dense_layers=3,
            width=7168,
            heads=128,
            attention="mla",
            head_dim=128,
            rope_head_dim=64,
            query_rank=1536,
            kv_rank=512,
            mlp_width=18432,
            experts=256,
            experts_per_token=8,
            shared_experts=1,
            expert_width=2048,
            expert_room=2.0,
            router="sigmoid",
            router_groups=8,
            router_group_limit=4,
            router_group_best=2,
            router_scale=2.5,
            balance_rate=0.001,
            balance_loss=0.0001,
            mtp_depth=1,
            vocab_size=129280,
            norm_epsilon=1e-6,
            latent_norm_epsilon=1e-6,
            init_std=0.006,
        ),
        data=DataConfig(sequence_length=4096, batch_size=15360),
        mesh=MeshConfig(data=-1, stage=16, expert=64),
        parallel=ParallelConfig(expert_nodes=8),
        pipeline=PipelineConfig(
            schedule="1f1b", microbatches=120, overlap=True, save=("layer_input",)
        ),
        precision=PrecisionConfig(params="bfloat16", moments="bfloat16"),
        optimizer=OptimizerConfig(learning_rate=2.2e-4, warmup_steps=2000),
        train=TrainConfig(steps=235_000, eval_every=1000),  # 14.8 trillion tokens
        checkpoint=CheckpointConfig(every=500),
    )
