"""Settings that break a rule, with the message that they cost, settings near them that break none,
and settings without a use with their note; of tests/config/.

Of the stores' packages s3fs is installed, and gcsfs is not.
"""

import math
import shlex
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import ConfigError, flags
from jaxtrain.config.rules.mesh_rules import AXES

BASE = cfg.replace(
    cfg.Config(),
    {
        "model.layers": 8,
        "model.heads": 8,
        "model.kv_heads": 4,
        "mesh.stage": 2,
        "mesh.model": 2,
        "pipeline.schedule": "interleaved",
        "pipeline.repeats": 2,
        "pipeline.microbatches": 4,
    },
)


def offer(error: ConfigError) -> dict[str, Any]:
    """What an error's text says to use, read as a shell and the command read it."""
    words = shlex.split(error.nearest.partition(" (or ")[0])
    pairs = [word.removeprefix("--config.").partition("=") for word in words]
    return {path: flags.setting_value(path, text) for path, _, text in pairs}


MIXER = "support.own_layers:Mixer"
SCALED = {"model.rope_factor": 4.0, "model.rope_original_length": 32}
LATENT = {
    "model.attention": "mla",
    "model.kv_heads": 0,
    "model.kv_rank": 32,
    "model.rope_head_dim": 8,
}

RULES = [
    (
        {"mesh.model": 3},
        "mesh.model=3 does not divide model.heads=8: use --config.mesh.model=2 (or 1, 4, 8)",
    ),
    *(
        (
            {"pipeline.steps_per_program": 3} | changes,
            f"pipeline.steps_per_program=3 {rule}: use --config.pipeline.steps_per_program=1",
        )
        for changes, rule in (
            (
                {"parallel.zero": 2},
                "updates parameters and gradients that no data shard splits, unlike "
                "parallel.zero=2",
            ),
            (
                {"parallel.zero": 1, "parallel.reduce": "microbatch"},
                "reduces gradients once, in each stage's update, unlike "
                "parallel.reduce='microbatch'",
            ),
            (
                {"parallel.offload": "activations"},
                "has its slots and its state in the devices' memory, unlike "
                "parallel.offload='activations'",
            ),
            (
                {"train.diloco_inner_steps": 20, "mesh.replica": 2},
                "updates all replicas alike, unlike train.diloco_inner_steps=20",
            ),
            (
                {"precision.params": "bfloat16"},
                "updates parameters of float32, unlike precision.params='bfloat16'",
            ),
            (
                {"precision.moments": "bfloat16"},
                "updates moments of float32, unlike precision.moments='bfloat16'",
            ),
            (
                {"precision.matmul": "fp8"},
                "gathers updated parameters in precision.compute, unlike precision.matmul='fp8'",
            ),
            (
                {"optimizer.name": "adafactor"},
                "updates each shard of a parameter on its own, unlike optimizer.name='adafactor'",
            ),
            (
                {"model.experts": 4},
                "updates parameters by gradients alone, and no counts, unlike model.experts=4",
            ),
            (
                {"model.kinds": ("moe.experts=4",), "model.pattern": ("full", "moe")},
                "updates parameters by gradients alone, and no counts, unlike model.experts=4 (in "
                "layers of kind moe)",
            ),
        )
    ),
    (
        {"mesh.model": 4, "data.sequence_length": 130},
        "mesh.model=4 does not divide data.sequence_length=130: use --config.mesh.model=2 (or 1)",
    ),
    (
        {"mesh.model": 4, "model.mlp_width": 6},
        "mesh.model=4 does not divide model.mlp_width=6: use --config.mesh.model=2 (or 1)",
    ),
    (
        {"mesh.model": 8, "model.heads": 24, "model.kv_heads": 3, "model.head_dim": 6},
        "mesh.model=8 neither divides model.kv_heads=3 nor is a multiple of it: use "
        "--config.mesh.model=1",
    ),
    (
        {"mesh.model": 8, "model.kv_heads": 2, "model.head_dim": 6},
        "mesh.model=8 makes 4 devices share a head, which does not divide model.head_dim=6: "
        "use --config.mesh.model=4 (or 1, 2)",
    ),
    (
        {"mesh.stage": 6},
        "mesh.stage=6 makes more chunks (mesh.stage=6 · pipeline.repeats=2) than "
        "model.layers=8: use --config.mesh.stage=5",
    ),
    (
        {"pipeline.repeats": 6},
        "pipeline.repeats=6 makes more chunks (mesh.stage=2 · pipeline.repeats=6) than "
        "model.layers=8: use --config.pipeline.repeats=5",
    ),
    (
        {"mesh.stage": 0},
        "mesh.stage=0 must be at least 1, or -1 for the remaining devices: use "
        "--config.mesh.stage=1",
    ),
    (
        {"mesh.stage": -2},
        "mesh.stage=-2 must be at least 1, or -1 for the remaining devices: use "
        "--config.mesh.stage=1",
    ),
    (
        {"mesh.stage": -1},
        "mesh.stage=-1 is the second -1, after mesh.data: only one axis may be -1: use "
        "--config.mesh.stage=1",
    ),
    (
        {"mesh.context": 3, "mesh.data": 1},
        "mesh.context=3 cuts a sequence into two chunks for each device, each cut by mesh.model=2: "
        "12 parts, which do not divide data.sequence_length=128"
        ": use --config.mesh.context=2",
    ),
    (
        {"mesh.context": 4, "parallel.context": "ulysses"},
        "parallel.context='ulysses' cuts heads, and mesh.context=4 · mesh.model=2 does not "
        "divide model.kv_heads=4"
        ": use --config.parallel.context=all_gather",
    ),
    (
        {
            "parallel.context": "ring",
            "mesh.context": 2,
            "mesh.stage": 1,
            "pipeline.repeats": 0,
            "model.attention_kernel": "cudnn",
        },
        "model.attention_kernel='cudnn' is not for parallel.context='ring': use "
        "--config.model.attention_kernel=auto",
    ),
    (
        {"parallel.collective_matmul": "on", "mesh.model": 2, "mesh.stage": 2, "mesh.data": 1},
        "parallel.collective_matmul='on' works only with mesh.stage=1, not 2: its permutes wait "
        "for all devices: use --config.parallel.collective_matmul=auto",
    ),
    (
        {
            "parallel.collective_matmul": "on",
            "mesh.model": 2,
            "mesh.stage": 1,
            "precision.matmul": "fp8",
            "precision.compute": "bfloat16",
        },
        "parallel.collective_matmul='on' sends numbers of precision.compute, and "
        "precision.matmul='fp8': use --config.parallel.collective_matmul=auto",
    ),
    *(
        (
            {
                "parallel.expert_nodes": nodes,
                "mesh.expert": 8,
                "mesh.data": 1,
                "model.experts": 8,
                "pipeline.microbatches": 2,
                **changes,
            },
            f"parallel.expert_nodes={nodes} {text}",
        )
        for nodes, changes, text in (
            (
                3,
                {},
                "does not divide mesh.expert=8: use --config.parallel.expert_nodes=2 (or 1, 4)",
            ),
            (
                8,
                {},
                "leaves a node one device of mesh.expert=8, which one step reaches: use "
                "--config.parallel.expert_nodes=4 (or 1, 2)",
            ),
            (
                2,
                {"model.capacity_factor": 1.5},
                "works only with model.capacity_factor=0, not 1.5: numbers of tokens between "
                "nodes are not fixed: use --config.parallel.expert_nodes=1",
            ),
        )
    ),
    (
        {"parallel.context": "heads"},
        "parallel.context='heads' is unknown: use --config.parallel.context=all_gather (or "
        "ulysses, ring)",
    ),
    (
        {"mesh.expert": 2},
        "mesh.expert=2 splits experts, and model.experts=0: use --config.mesh.expert=1",
    ),
    (
        {"mesh.expert": 2, "model.experts": 5, "mesh.data": 1},
        "mesh.expert=2 does not divide model.experts=5: use --config.mesh.expert=1",
    ),
    (
        {"mesh.expert": 8, "model.experts": 4, "mesh.data": 1},
        "mesh.expert=8 does not divide model.experts=4: use --config.mesh.expert=4 (or 1, 2)",
    ),
    (
        {"mesh.model": 4, "model.experts": 4, "model.expert_width": 6},
        "mesh.model=4 does not divide model.expert_width=6: use --config.mesh.model=2 (or 1)",
    ),
    (
        {
            "mesh.model": 4,
            "model.experts": 4,
            "model.dense_layers": 1,
            "model.expert_width": 8,
            "model.mlp_width": 6,
        },
        "mesh.model=4 does not divide model.mlp_width=6: use --config.mesh.model=2 (or 1)",
    ),
    (
        {"model.router": "topk", "model.experts": 4},
        "model.router='topk' is unknown: use --config.model.router=softmax (or sigmoid)",
    ),
    ({"model.experts": -1}, "model.experts=-1 must be at least 0: use --config.model.experts=0"),
    (
        {"model.experts": 4, "model.experts_per_token": 5},
        "model.experts_per_token=5 is more than model.experts=4: use "
        "--config.model.experts_per_token=4",
    ),
    (
        {"model.experts": 8, "model.router_groups": 3},
        "model.router_groups=3 does not divide model.experts=8: use "
        "--config.model.router_groups=2 (or 1, 4)",
    ),
    (
        {"model.experts": 8, "model.router_groups": 4, "model.router_group_limit": 5},
        "model.router_group_limit=5 is more than model.router_groups=4: use "
        "--config.model.router_group_limit=4",
    ),
    (
        {"model.experts": 4, "model.expert_room": 0.5},
        "model.expert_room=0.5 is less than the mean number of tokens, so that some are always "
        "dropped: it must be at least 1, or 0 for the worst case: use "
        "--config.model.expert_room=1.0",
    ),
    (
        {"model.experts": 8, "model.router_groups": 4, "model.experts_per_token": 3},
        "model.experts_per_token=3 is more than the 2 in model.router_group_limit=1 groups: "
        "use --config.model.experts_per_token=2",
    ),
    (
        {"model.dense_layers": 2},
        "model.dense_layers=2 come before layers with experts, and model.experts=0: use "
        "--config.model.dense_layers=0",
    ),
    (
        {
            "model.experts": 12,
            "model.router_groups": 3,
            "model.router_group_limit": 2,
            "model.router_group_best": 5,
        },
        "model.router_group_best=5 is more than the 4 in each of model.router_groups=3: use "
        "--config.model.router_group_best=4",
    ),
    (
        {"model.experts": 4, "model.dense_layers": 2, "pipeline.vocabulary": "parallel"},
        "pipeline.vocabulary='parallel' splits embedding and head over the stages, and "
        "model.dense_layers=2 needs them on one stage"
        ": use --config.pipeline.vocabulary=auto",
    ),
    (
        {"model.experts": 4, "model.biases": ("qkv", "mlp", "router")},
        "model.biases=('qkv', 'mlp', 'router') has 'mlp' with model.experts=4 in every layer, and "
        "no other MLP: use --config.model.biases=qkv,router",
    ),
    (
        {"model.biases": ("out", "experts")},
        "model.biases=('out', 'experts') has 'experts' with model.experts=0: use "
        "--config.model.biases=out",
    ),
    (
        {"model.mup_base_width": 64, "model.mixer": MIXER},
        f"model.mup_base_width=64 scales initial values, and {MIXER} draws its own: use "
        "--config.model.mup_base_width=0",
    ),
    (
        {"model.parallel_block": True, "model.norm_place": "both"},
        "model.norm_place='both' has a norm of the MLP's own, and with model.parallel_block=True "
        "attention and MLP share one: use --config.model.norm_place=before",
    ),
    (
        {"model.biases": ("router", "out")},
        "model.biases=('router', 'out') has 'router' with model.experts=0, where there is no "
        "router: use --config.model.biases=out",
    ),
    (
        {"model.biases": ("out", "norm")},
        "model.biases=('out', 'norm') has 'norm' with model.norm='rmsnorm', which has no bias: use "
        "--config.model.biases=out",
    ),
    (
        {"model.biases": ("out", "kqv")},
        "model.biases=('out', 'kqv') names 'kqv', which is none of qkv, out, mlp, router, norm, "
        "experts: use --config.model.biases=out,qkv",
    ),
    (
        {"model.biases": ("out", "attention", "mlp")},
        "model.biases=('out', 'attention', 'mlp') names 'attention', which is none of qkv, out, "
        "mlp, router, norm, experts: use --config.model.biases=out,mlp",
    ),
    (
        {"model.biases": ("out", "qkv", "out")},
        "model.biases=('out', 'qkv', 'out') has an empty or repeated name: use "
        "--config.model.biases=out,qkv",
    ),
    (
        {"metrics.trackers": ("mlflow", "wnadb", "own.py:Tracker")},
        "metrics.trackers=('mlflow', 'wnadb', 'own.py:Tracker') names 'wnadb', which is none of "
        "wandb, trackio, mlflow: use --config.metrics.trackers=mlflow,wandb,own.py:Tracker",
    ),
    (
        {"optimizer.name": "adamv"},
        "optimizer.name='adamv' is unknown: use --config.optimizer.name=adamw",
    ),
    (
        {"optimizer.name": "absent.module:MINE"},
        "optimizer.name='absent.module:MINE' names no module: absent is not on Python's path "
        "(PYTHONPATH): use --config.optimizer.name=adamw",
    ),
    (
        {"optimizer.name": "jaxtrain.config.optimizers:copies"},
        "optimizer.name='jaxtrain.config.optimizers:copies' is no OptimizerRecord "
        "(jaxtrain.config.optimizers), but of type function: use --config.optimizer.name=adamw",
    ),
    (
        {"train.loss": "loss.py"},
        "train.loss='loss.py' is not FILE.py:NAME or package.module:NAME: use --config.train.loss=",
    ),
    (
        {"train.evaluate": "own.py"},
        "train.evaluate='own.py' is not FILE.py:NAME or package.module:NAME: use "
        "--config.train.evaluate=",
    ),
    (
        {"train.fork_from": "runs/a@20", "train.init_from": "org/model"},
        "train.fork_from='runs/a@20' has weights for a new run, and so has "
        "train.init_from='org/model': use --config.train.init_from=",
    ),
    (
        {"train.loss": "mine:loss", "train.z_loss": 1e-4},
        "train.z_loss=0.0001 is a term of cross-entropy, in whose place is train.loss='mine:loss': "
        "use --config.train.z_loss=0.0",
    ),
    (
        {"train.loss": "mine:loss", "pipeline.vocabulary": "parallel"},
        "pipeline.vocabulary='parallel' splits a token's logits over the stages, and "
        "train.loss='mine:loss' reads them on one: use --config.pipeline.vocabulary=auto",
    ),
    (
        {
            "model.dropout_attention": 0.1,
            "mesh.context": 2,
            "mesh.model": 1,
            "parallel.context": "ring",
        },
        "parallel.context='ring' drops no weights of attention, and model.dropout_attention=0.1: "
        "use --config.parallel.context=all_gather",
    ),
    *(
        (
            {"model.dropout_attention": 0.1, "model.attention_kernel": kernel},
            f"model.attention_kernel='{kernel}' drops no weights: use "
            "--config.model.attention_kernel=auto",
        )
        for kernel in ("splash", "cudnn")
    ),
    (
        {"model.norm": "batch"},
        "model.norm='batch' is unknown: use --config.model.norm=rmsnorm (or layernorm)",
    ),
    (
        {"pipeline.schedule": "intreleaved"},
        "pipeline.schedule='intreleaved' is unknown: use --config.pipeline.schedule=interleaved",
    ),
    (
        {"pipeline.remat": "some"},
        "pipeline.remat='some' is unknown: use --config.pipeline.remat=full (or selective, none)",
    ),
    (
        {"parallel.zero": 4},
        "parallel.zero=4 is not built: the choices are 0, 1, 2 or 3: use --config.parallel.zero=3",
    ),
    (
        {"parallel.zero": 0, "parallel.reduce": "microbatch"},
        "parallel.reduce='microbatch' leaves gradients sharded, and parallel.zero=0 shards "
        "nothing: use --config.parallel.reduce=step",
    ),
    (
        {"parallel.reduce": "last", "mesh.stage": 1, "mesh.data": 2},
        "parallel.reduce='last' reduces gradients in a pipeline's last W, and mesh.stage=1: "
        "use --config.parallel.reduce=step",
    ),
    (
        {"train.diloco_inner_steps": 20, "mesh.replica": 2, "parallel.offload": "both"},
        "parallel.offload='both' offloads the optimizer's state, which independent replicas "
        "(train.diloco_inner_steps=20) keep on their devices"
        ": use --config.parallel.offload=activations",
    ),
    (
        {"train.diloco_inner_steps": 20, "mesh.replica": 2, "parallel.offload": "optimizer"},
        "parallel.offload='optimizer' offloads the optimizer's state, which independent "
        "replicas (train.diloco_inner_steps=20) keep on their devices"
        ": use --config.parallel.offload=none",
    ),
    (
        {"train.eval_ema": True},
        "train.eval_ema=True needs an average, and optimizer.ema_decay=0: use "
        "--config.train.eval_ema=false",
    ),
    (
        {"optimizer.ema_decay": 0.9, "train.diloco_inner_steps": 20, "mesh.replica": 2},
        "optimizer.ema_decay=0.9 is for one set of parameters, and replicas have their own with "
        "train.diloco_inner_steps=20: use --config.optimizer.ema_decay=0.0",
    ),
    (
        {
            "optimizer.ema_decay": 0.9,
            "parallel.offload": "optimizer",
            "parallel.offload_directory": "/mnt/nvme",
        },
        "optimizer.ema_decay=0.9 has no average on disk, where "
        "parallel.offload_directory='/mnt/nvme' keeps the optimizer's state: use "
        "--config.parallel.offload_directory=",
    ),
    (
        {"parallel.offload_directory": "/mnt/nvme"},
        "parallel.offload_directory='/mnt/nvme' is for the optimizer's state, which "
        "parallel.offload='none' leaves on the devices: use --config.parallel.offload=optimizer",
    ),
    (
        {"parallel.offload": "optimizer", "parallel.offload_directory": "s3://bucket/state"},
        "parallel.offload_directory='s3://bucket/state' is no folder of a local "
        "disk: use --config.parallel.offload_directory=",
    ),
    (
        {
            "parallel.offload": "both",
            "parallel.offload_directory": "/mnt/nvme",
            "checkpoint.local": "/dev/shm/jaxtrain",
            "checkpoint.local_every": 5,
        },
        "checkpoint.local='/dev/shm/jaxtrain' copies the state to memory, and "
        "parallel.offload_directory='/mnt/nvme' keeps it on disk because memory has no space for "
        "it: use --config.checkpoint.local= --config.checkpoint.local_every=0",
    ),
    (
        {"parallel.compiler_options": ("xla_gpu_enable_x=true", "--xla_tpu_y=1")},
        "parallel.compiler_options=('xla_gpu_enable_x=true', '--xla_tpu_y=1') has "
        "'--xla_tpu_y=1', which is not an XLA option such as "
        "xla_gpu_enable_latency_hiding_scheduler=true: use "
        "--config.parallel.compiler_options=xla_gpu_enable_x=true",
    ),
    (
        {"parallel.compiler_options": ("xla_a=1", "xla_a=2")},
        "parallel.compiler_options=('xla_a=1', 'xla_a=2') names a setting twice: use "
        "--config.parallel.compiler_options=xla_a=2",
    ),
    (
        {"parallel.offload": "optimiser"},
        "parallel.offload='optimiser' is unknown: use --config.parallel.offload=optimizer",
    ),
    (
        {"train.diloco_inner_steps": 20},
        "train.diloco_inner_steps=20 is for independent replicas, and mesh.replica=1: "
        "use --config.mesh.replica=2",
    ),
    (
        {"pipeline.schedule": "1f1b"},
        "pipeline.repeats=2 does not fit pipeline.schedule='1f1b', which has exactly 1 chunk "
        "on a stage: use --config.pipeline.repeats=1",
    ),
    (
        {"pipeline.repeats": 1},
        "pipeline.repeats=1 does not fit pipeline.schedule='interleaved', which has at least "
        "2 chunks on a stage"
        ": use --config.pipeline.repeats=2",
    ),
    (
        {"pipeline.schedule": "zb_v", "pipeline.repeats": 3},
        "pipeline.repeats=3 does not fit pipeline.schedule='zb_v', which has exactly 2 chunks "
        "on a stage: use --config.pipeline.repeats=2",
    ),
    (
        {"pipeline.overlap": True, "pipeline.schedule": "zb_v"},
        "pipeline.overlap=True needs an F and a B of two microbatches side by side, as in the "
        "order of 1f1b, interleaved, dualpipe_v, and pipeline.schedule='zb_v' has none: use "
        "--config.pipeline.overlap=false",
    ),
    (
        {
            "pipeline.overlap": True,
            "pipeline.schedule": "dualpipe_v",
            "pipeline.permute": "aligned",
        },
        "pipeline.overlap=True is not packed by pipeline.permute='aligned': use "
        "--config.pipeline.overlap=false",
    ),
    (
        {"pipeline.memory": 2.0},
        "pipeline.memory=2.0 is for pipeline.schedule='auto' alone, not 'interleaved': use "
        "--config.pipeline.memory=0.0",
    ),
    (
        {"pipeline.chunk_layers": (2, 0, 3, 3)},
        "pipeline.chunk_layers=(2, 0, 3, 3) has a chunk without layers that is not the first or "
        "last: use --config.pipeline.chunk_layers=",
    ),
    (
        {"pipeline.times": (1.0, 2.0)},
        "pipeline.times=(1.0, 2.0) must have a time for F, B and W each, and may have one for "
        "message, R, head, FB, update and embedding: use --config.pipeline.times=1.0,2.0,1.0",
    ),
    (
        {"pipeline.times": (1.0, 2.0, 1.0, 0.0, 0.0, 1.0, 1.5)},
        "pipeline.times=(1.0, 2.0, 1.0, 0.0, 0.0, 1.0, 1.5) has less time for FB, an F and a B at "
        "the same time, than for one of them: use "
        "--config.pipeline.times=1.0,2.0,1.0,0.0,0.0,1.0,2.0",
    ),
    (
        {"pipeline.times": (1.0, 0.0, 1.0)},
        "pipeline.times=(1.0, 0.0, 1.0) has no time for F, B or W: use --config.pipeline.times=",
    ),
    (
        {"pipeline.layer_costs": (1.0, 2.0)},
        "pipeline.layer_costs=(1.0, 2.0) must have a number for each of model.layers=8: use "
        "--config.pipeline.layer_costs=",
    ),
    (
        {"pipeline.layer_costs": (-1.0,) * 8},
        f"pipeline.layer_costs={(-1.0,) * 8} has a number that is not above 0 or above "
        "2147483647: use --config.pipeline.layer_costs=",
    ),
    (
        {"pipeline.chunk_layers": (2, 2, 3)},
        "pipeline.chunk_layers=(2, 2, 3) does not sum to model.layers=8: use "
        "--config.pipeline.chunk_layers=",
    ),
    (
        {"pipeline.chunk_layers": (4, 4)},
        "pipeline.chunk_layers=(4, 4) must have mesh.stage=2 · pipeline.repeats=2 = 4 "
        "numbers: use --config.pipeline.chunk_layers=",
    ),
    (
        {"pipeline.chunk_layers": (3, 3, 2), "pipeline.schedule": "auto", "pipeline.repeats": 0},
        "pipeline.chunk_layers=(3, 3, 2) has 3 numbers, no multiple of mesh.stage=2: use "
        "--config.pipeline.chunk_layers=",
    ),
    (
        {"pipeline.chunk_layers": (1, 3, 2, 2), "pipeline.layer_costs": (1.0,) * 8},
        "pipeline.chunk_layers=(1, 3, 2, 2) and pipeline.layer_costs both cut the layers: use "
        "--config.pipeline.layer_costs=",
    ),
    (
        {"pipeline.microbatches": 5},
        "pipeline.microbatches=5 does not divide data.batch_size=16: use "
        "--config.pipeline.microbatches=4 (or 1, 2, 8)",
    ),
    (
        {"mesh.replica": 3},
        "data.batch_size=16 is no multiple of mesh.replica=3 × pipeline.microbatches=4, that is 12"
        ": use --config.data.batch_size=12 (or 24)",
    ),
    (
        {"model.heads": 6, "model.kv_heads": 0},
        "model.heads=6 does not divide model.width=128, and model.head_dim=0 means "
        "width/heads: use --config.model.heads=4 (or 2, 8, 16)",
    ),
    (
        {"model.mtp_depth": 128},
        "model.mtp_depth=128 predicts tokens beyond data.sequence_length=128: use "
        "--config.model.mtp_depth=127",
    ),
    (
        {"model.mtp_depth": 1, "pipeline.vocabulary": "parallel"},
        "pipeline.vocabulary='parallel' splits embedding and head over the stages, and "
        "model.mtp_depth=1 needs them on one stage"
        ": use --config.pipeline.vocabulary=auto",
    ),
    (
        {"model.rotary_dim": 5},
        "model.rotary_dim=5 is the part of model.head_dim=16 that rotary positions rotate, in "
        "pairs of numbers: it must be even and at most as large: use --config.model.rotary_dim=6",
    ),
    (
        {"model.rotary_dim": 18},
        "model.rotary_dim=18 is the part of model.head_dim=16 that rotary positions rotate, in "
        "pairs of numbers: it must be even and at most as large: use --config.model.rotary_dim=16",
    ),
    (
        {"model.pattern": ("windw", "full"), "model.window": 4},
        "model.pattern=('windw', 'full') has kind 'windw', which is neither of window, full, nope, "
        "dense, block, mixer nor of model.kinds: use --config.model.pattern=window,full",
    ),
    (
        {"model.pattern": ("window", "full")},
        "model.window=0 is not set, and model.pattern has layers of kind window: use "
        "--config.model.window=1024",
    ),
    (
        {"model.pattern": ("mixer", "full")},
        "model.mixer='' is not set, and model.pattern has layers of kind mixer: use "
        "--config.model.pattern=full",
    ),
    (
        {"model.kinds": ("table.positions=learned",), "model.pattern": ("table", "full")},
        "model.pattern=('table', 'full') has layers of kind table with learned positions, which "
        "are all layers': use --config.model.positions=learned",
    ),
    (
        {"model.pattern": 3 * ("nope", "full", "full")},
        "model.pattern=('nope', 'full', 'full', 'nope', 'full', 'full', 'nope', 'full', 'full') "
        "names 9 layers, and the model has 8: use "
        "--config.model.pattern=nope,full,full,nope,full,full,nope,full",
    ),
    (
        {"model.kinds": ("full.window=4", "full.rotary_bose=3")},
        "model.kinds=('full.window=4', 'full.rotary_bose=3') has 'full.rotary_bose=3', and "
        "model.rotary_bose is an unknown setting: use "
        "--config.model.kinds=full.window=4,full.rotary_base=3",
    ),
    (
        {"model.kinds": ("full.window",)},
        "model.kinds=('full.window',) has 'full.window', which is not KIND.SETTING=VALUE or "
        "KIND.block_settings.NAME=VALUE: use --config.model.kinds=",
    ),
    (
        {"model.kinds": ("full.layers=3",)},
        "model.kinds=('full.layers=3',) has 'full.layers=3', and model.layers is a setting of the "
        "whole model: use --config.model.kinds=",
    ),
    (
        {"model.kinds": ("full.heads=2.5",)},
        "model.kinds=('full.heads=2.5',) has 'full.heads=2.5', and model.heads=2.5 is not an "
        "integer: use --config.model.kinds=full.heads=2",
    ),
    (
        {"model.kinds": ("full.sinks=2",)},
        "model.kinds=('full.sinks=2',) has 'full.sinks=2', and model.sinks='2' is not a "
        "boolean (true or false): use --config.model.kinds=",
    ),
    (
        {"model.kinds": ("full.biases=qkv+oud",)},
        "model.kinds=('full.biases=qkv+oud',) has 'full.biases=qkv+oud', and model.biases=('qkv', "
        "'oud') names 'oud', which is none of qkv, out, mlp, router, norm, experts: use "
        "--config.model.kinds=full.biases=qkv+out",
    ),
    (
        {"model.kinds": ("full.block_settings=3",)},
        "model.kinds=('full.block_settings=3',) has 'full.block_settings=3', which is not "
        "KIND.SETTING=VALUE or KIND.block_settings.NAME=VALUE: use --config.model.kinds=",
    ),
    (
        {"model.kinds": ("full.heads.x=3",)},
        "model.kinds=('full.heads.x=3',) has 'full.heads.x=3', which is not KIND.SETTING=VALUE or "
        "KIND.block_settings.NAME=VALUE: use --config.model.kinds=",
    ),
    (  # of the layers of one kind
        {"model.kinds": ("wide.head_dim=7",), "model.pattern": ("wide", "full")},
        "model.kinds=('wide.head_dim=7',) makes model.head_dim=7, which makes heads of 7, and "
        "rotary positions rotate pairs of numbers: it must be even (in layers of kind wide): use "
        "--config.model.kinds=wide.head_dim=8",
    ),
    (  # of a setting that the kind has from the model
        {"model.kinds": ("few.heads=2",), "model.pattern": ("few", "full")},
        "model.kv_heads=4 does not divide model.heads=2 (in layers of kind few): use "
        "--config.model.kv_heads=2 (or 1)",
    ),
    (
        {
            "model.kinds": ("moe.experts=8", "moe.experts_per_token=9"),
            "model.pattern": ("moe", "full"),
        },
        "model.kinds=('moe.experts=8', 'moe.experts_per_token=9') makes model.experts_per_token=9, "
        "which is more than model.experts=8 (in layers of kind moe): use "
        "--config.model.kinds=moe.experts=8,moe.experts_per_token=8",
    ),
    (
        {"model.rope_scaling": "dynamic"},
        "model.rope_scaling='dynamic' changes the frequencies with a sequence's length, and keys "
        "in a cache would keep those of a shorter one: use --config.model.rope_scaling=none",
    ),
    (
        {"model.rope_scaling": "linear"},
        "model.rope_factor=0.0 is no divisor of frequencies, and model.rope_scaling='linear' needs "
        "one: use --config.model.rope_factor=8.0",
    ),
    (
        {"model.rope_scaling": "llama3", "model.rope_factor": 4.0},
        "model.rope_original_length=0 is no length, and model.rope_scaling='llama3' needs that of "
        "the sequences before scaling: use --config.model.rope_original_length=32",
    ),
    (
        {**SCALED, "model.rope_scaling": "llama3", "model.rope_high_freq_factor": 1.0},
        "model.rope_high_freq_factor=1.0 is not above model.rope_low_freq_factor=1.0: use "
        "--config.model.rope_high_freq_factor=4.0",
    ),
    (
        {**SCALED, "model.rope_scaling": "yarn", "model.rope_beta_fast": 0.5},
        "model.rope_beta_fast=0.5 is less than model.rope_beta_slow=1.0: use "
        "--config.model.rope_beta_fast=32.0",
    ),
    (
        {**LATENT, "model.positions": "learned"},
        "model.attention='mla' rotates a part of each head, and "
        "model.positions='learned' rotates nothing: use --config.model.positions=rotary",
    ),
    (
        {**LATENT, "model.kv_heads": 4},
        "model.kv_heads=4 is for model.attention='gqa': with mla each of model.heads=8 has "
        "its own keys and values"
        ": use --config.model.kv_heads=0",
    ),
    (
        {"model.attention": "mla", "model.kv_heads": 0},
        "model.kv_rank=0 leaves model.attention='mla' without a latent: use "
        "--config.model.attention=gqa",
    ),
    (
        {**LATENT, "model.kv_rank": 0},
        "model.kv_rank=0 leaves model.attention='mla' without a latent: use "
        "--config.model.kv_rank=64",
    ),
    (
        {**LATENT, "model.rope_head_dim": 5},
        "model.rope_head_dim=5 is the part of a head that model.attention='mla' "
        "rotates, in pairs of numbers: it must be even and above 0"
        ": use --config.model.rope_head_dim=6",
    ),
    (
        {**LATENT, "model.rope_head_dim": 0},
        "model.rope_head_dim=0 is the part of a head that model.attention='mla' "
        "rotates, in pairs of numbers: it must be even and above 0"
        ": use --config.model.rope_head_dim=8",
    ),
    (
        {**LATENT, "model.attention_kernel": "cudnn", "model.value_head_dim": 20},
        "model.attention_kernel='cudnn' is for heads whose size is a multiple of 8, at most 256, "
        "not 24 and 20"
        ": use --config.model.attention_kernel=auto",
    ),
    (
        {"model.attention_kernel": "splash", "data.sequence_length": 192},
        "model.attention_kernel='splash' takes multiples of 128 tokens, not 192: use "
        "--config.model.attention_kernel=auto",
    ),
    (
        {"precision.matmul": "mxfp8", "mesh.data": 1, "model.mlp_width": 336},
        "precision.matmul='mxfp8' has blocks of 32 numbers, which do not divide "
        "model.mlp_width=336 in 2 parts: use --config.model.mlp_width=320",
    ),
    (
        {"precision.matmul": "mxfp8", "model.experts": 4},
        "precision.matmul='mxfp8' has no products for model.experts=4 yet, only for dense layers: "
        "use --config.precision.matmul=fp8 (or compute)",
    ),
    (
        {"precision.matmul": "mxfp8", **LATENT},
        "precision.matmul='mxfp8' has no products for model.attention='mla' yet, only for dense "
        "layers: use --config.precision.matmul=fp8 (or compute)",
    ),
    (
        {"model.attention_kernel": "cudnn", "precision.compute": "float32"},
        "model.attention_kernel='cudnn' is for 16 bits, not precision.compute='float32': use "
        "--config.model.attention_kernel=auto",
    ),
    (
        {"model.attention_kernel": "cudnn", "model.head_dim": 132},
        "model.attention_kernel='cudnn' is for heads whose size is a multiple of 8, at most 256, "
        "not 132: use --config.model.attention_kernel=auto",
    ),
    (
        {"model.kv_heads": 3},
        "model.kv_heads=3 does not divide model.heads=8: use --config.model.kv_heads=2 (or 1, "
        "4, 8)",
    ),
    (
        {"model.head_dim": 5},
        "model.head_dim=5 makes heads of 5, and rotary positions rotate pairs of "
        "numbers: it must be even: use --config.model.head_dim=6",
    ),
    (
        {"model.positions": "learned", "model.max_positions": 64},
        "model.max_positions=64 is a shorter table than data.sequence_length=128: use "
        "--config.model.max_positions=128",
    ),
    (
        {"model.positions": "learned", "train.sample_tokens": 128},
        "train.sample_tokens=128 and a prompt are longer than the learned positions, "
        "model.max_positions=128"
        ": use --config.train.sample_tokens=127",
    ),
    (
        {"model.vocab_size": 256},
        "model.vocab_size=256 is too small for data.tokenizer='bytes', which has 257 tokens: "
        "use --config.model.vocab_size=257",
    ),
    (
        {"optimizer.learning_rate": 0.0},
        "optimizer.learning_rate=0.0 must be above 0: use --config.optimizer.learning_rate=0.0003",
    ),
    (
        {"optimizer.learning_rate": math.nan},
        "optimizer.learning_rate=nan is not a finite number: use "
        "--config.optimizer.learning_rate=0.0003",
    ),
    (
        {"optimizer.clip_norm": math.inf},
        "optimizer.clip_norm=inf is not a finite number: use --config.optimizer.clip_norm=1.0",
    ),
    (
        {"optimizer.b1": 1.0},
        "optimizer.b1=1.0 must be at least 0 and below 1: use --config.optimizer.b1=0.9",
    ),
    (
        {"optimizer.b2": -0.5},
        "optimizer.b2=-0.5 must be at least 0 and below 1: use --config.optimizer.b2=0.0",
    ),
    (
        {
            "optimizer.decay_steps": 60,
            "optimizer.warmup_steps": 50,
            "optimizer.schedule": "constant",
        },
        "optimizer.decay_steps=60 and optimizer.warmup_steps=50 are more than "
        "train.steps=100: use --config.optimizer.decay_steps=50",
    ),
    (
        {"optimizer.decay_steps": 101, "optimizer.schedule": "1-sqrt"},
        "optimizer.decay_steps=101 and optimizer.warmup_steps=0 are more than "
        "train.steps=100: use --config.optimizer.decay_steps=100",
    ),
    ({"train.steps": 0}, "train.steps=0 must be at least 1: use --config.train.steps=1"),
    (
        {"train.steps": 2**31},
        "train.steps=2147483648 is larger than 2147483647: use --config.train.steps=2147483647",
    ),
    (
        {"model.layers": 2**31 - 1},
        "model.layers=2147483647 must be at least 1 and at most 65536: use "
        "--config.model.layers=65536",
    ),
    ({"train.steps": 2.5}, "train.steps=2.5 is not an integer: use --config.train.steps=2"),
    ({"train.steps": True}, "train.steps=True is not an integer"),
    (
        {"model.qk_norm": 1},
        "model.qk_norm=1 is not a boolean (true or false): use --config.model.qk_norm=true",
    ),
    (
        {"model.biases": True},
        "model.biases=True is not a tuple of strings",
    ),
    (
        {"train.profile_steps": 99},
        "train.profile_steps=99 from the third step on are more than train.steps=100: use "
        "--config.train.profile_steps=98",
    ),
    (
        {"data.loss_mask": ("prompt",)},
        "data.loss_mask=('prompt',) names 'prompt', which is not in "
        "data.text_fields=('text',): use --config.data.text_fields=prompt,text",
    ),
    (
        {"data.loss_mask": ("text",)},
        "data.loss_mask=('text',) names all of data.text_fields: no token would have a loss: "
        "use --config.data.loss_mask=",
    ),
    (
        {"data.text_fields": ("a", "b", "a")},
        "data.text_fields=('a', 'b', 'a') has an empty or repeated name: use "
        "--config.data.text_fields=a,b",
    ),
    (
        {"data.text_fields": ()},
        "data.text_fields=() names no field to read: use --config.data.text_fields=text",
    ),
    (
        {"data.sequence_length": 0},
        "data.sequence_length=0 must be at least 1: use --config.data.sequence_length=128",
    ),
    (
        {"train.on_nonfinite": "skip", "train.spike_threshold": 6.0},
        "train.spike_threshold=6.0 is for train.on_nonfinite='rollback' alone, not 'skip': "
        "use --config.train.on_nonfinite=rollback",
    ),
    (
        {"train.eval_every": 5, "data.validation_fraction": 0.0},
        "train.eval_every=5 needs held-out data, and data.validation_fraction=0: use "
        "--config.train.eval_every=0",
    ),
    (
        {"checkpoint.directory": "http://bucket/run"},
        "checkpoint.directory='http://bucket/run' is in an unknown store: use "
        "--config.checkpoint.directory=s3://bucket/run",
    ),
    *(
        (
            {"checkpoint.directory": place},
            f"checkpoint.directory={place!r} is not the address of a store: use "
            f"--config.checkpoint.directory={meant}",
        )
        for place, meant in {
            "S3://bucket/run/5": "s3://bucket/run/5",
            "s3:/bucket": "s3://bucket/run",
            "s3:///bucket/run": "s3://bucket/run",
            "file:///runs/five": "/runs/five",
            "GS://bucket/run": "",  # its package is not installed
        }.items()
    ),
    (
        {"data.cache": "s3://bucket/cache"},
        "data.cache='s3://bucket/cache' is no folder of this machine: use --config.data.cache=",
    ),
    (
        {"checkpoint.directory": "~nobody_here/x"},
        "checkpoint.directory='~nobody_here/x' is below a home folder that does not exist here: "
        "use --config.checkpoint.directory=",
    ),
    (
        {"checkpoint.directory": "runs/\udcff"},
        "checkpoint.directory='runs/\\udcff' holds bytes that are not UTF-8, and arrays cannot be "
        "stored under such a name: "
        "use --config.checkpoint.directory=runs/_",
    ),
    (
        {"checkpoint.directory": "s3://bucket"},
        "checkpoint.directory='s3://bucket' is not a folder in a bucket: use "
        "--config.checkpoint.directory=s3://bucket/run",
    ),
    (
        {"checkpoint.local": "/dev/shm/jaxtrain"},
        "checkpoint.local_every=0 leaves checkpoint.local='/dev/shm/jaxtrain' without a step "
        "at which to save: "
        "use --config.checkpoint.local_every=10",
    ),
    (
        {"checkpoint.local_every": 5},
        "checkpoint.local_every=5 needs a folder, and checkpoint.local is empty: use "
        "--config.checkpoint.local=/dev/shm/jaxtrain",
    ),
    (
        {"checkpoint.local": "ram/disk", "checkpoint.local_every": 5},
        "checkpoint.local='ram/disk' is not an absolute path, which every machine needs: "
        "use --config.checkpoint.local=/dev/shm/ram/disk",
    ),
]

ALLOWED = [
    {"mesh.stage": 1},
    {"mesh.stage": 1, "pipeline.schedule": "1f1b", "pipeline.repeats": 1},
    {"pipeline.schedule": "gpipe", "pipeline.repeats": 1},
    {"pipeline.schedule": "gpipe", "pipeline.repeats": 4},
    {"pipeline.schedule": "zb_v", "pipeline.repeats": 0},
    {"pipeline.schedule": "auto", "pipeline.repeats": 0, "pipeline.memory": 1.5},
    {"pipeline.schedule": "csv:mine.csv", "pipeline.repeats": 0},
    {"pipeline.chunk_layers": (1, 3, 2, 2)},
    {
        "pipeline.layer_costs": (1.0, 2.0, 0.5, 3.0, 1.0, 1.0, 1.0, 1.0),
        "pipeline.times": (2.0, 2.0, 1.0, 0.1),
    },
    {"mesh.data": 4, "mesh.replica": 1},
    {"mesh.replica": 2},
    {"mesh.model": 8, "model.kv_heads": 2},
    {"mesh.replica": 2, "train.diloco_inner_steps": 20, "parallel.offload": "activations"},
    {
        "mesh.replica": 2,
        "train.diloco_inner_steps": 500,
        "precision.outer": "int8",
        "optimizer.outer_momentum": 0.0,
    },
    {"model.layers": 7, "mesh.stage": 3},
    {"model.heads": 6, "model.kv_heads": 2, "model.head_dim": 22},
    {"model.head_dim": 5, "model.positions": "learned"},
    {"model.mtp_depth": 2, "model.mtp_weight": 0.1, "pipeline.vocabulary": "end_stages"},
    LATENT,
    {
        **LATENT,
        "model.head_dim": 5,
        "model.query_rank": 24,
        "model.value_head_dim": 7,
        "model.kv_heads": 8,
    },
    {"model.vocab_size": 256, "data.source": "tokens.bin"},
    {"optimizer.warmup_steps": 200},
    {"data.loss_mask": ("prompt",), "data.text_fields": ("prompt", "answer")},
    {"mesh.data": 1, "mesh.model": -1},
    {"pipeline.microbatches": 16},
    {
        "model.experts": 6,
        "mesh.expert": 2,
        "mesh.data": 1,
        "model.mlp_width": 7,
        "model.expert_width": 8,
    },
    {
        "model.experts": 8,
        "model.router_groups": 4,
        "model.router_group_limit": 2,
        "model.experts_per_token": 4,
    },
    {
        "model.experts": 8,
        "model.router_groups": 8,
        "model.router_group_limit": 5,
        "model.experts_per_token": 3,
    },
    {
        "model.experts": 12,
        "model.router_groups": 3,
        "model.router_group_best": 4,
        "model.router_normalize": "never",
    },
    {"model.experts": 8, "model.router_bias": False},
    {
        "model.experts": 8,
        "model.router_bias": False,
        "model.balance_rate": 0.0,
        "model.experts_per_token": 1,
    },
    {**LATENT, "model.latent_norm_epsilon": 1e-6},
]

# Settings that are not at their defaults and have no use: what the note says. A recipe's must work
# without.
UNUSED = [
    (
        {"train.fork_inherits": "weights"},
        "train.fork_inherits=weights has no use with train.fork_from=''",
    ),
    (
        {"train.evaluate_seconds": 60.0},
        "train.evaluate_seconds=60.0 has no use with train.evaluate=''",
    ),
    (
        {"model.mup_base_head_dim": 16},
        "model.mup_base_head_dim=16 has no use with model.mup_base_width=0 and "
        "model.attention_scale=0.0",
    ),
    (
        {"model.kinds": ("few.heads=2",), "model.pattern": ("full", "nope")},
        "model.kinds=few.heads=2 has no use: no layer is of kind few",
    ),
    (
        {"model.kinds": ("nope.rotary_base=100",), "model.pattern": ("full", "nope")},
        "model.kinds=nope.rotary_base=100 has no use with model.positions='none'",
    ),
    (
        {"model.window": 8, "model.pattern": ("full", "nope")},
        "model.window=8 has no use with the kinds of model.pattern, none of which has a window",
    ),
    (
        {"model.positions": "learned", "model.pattern": ("full", "nope")},
        "nope in model.pattern=full,nope has no use with model.positions='learned'",
    ),
    (
        {"mesh.stage": 1},
        "pipeline.schedule=interleaved and pipeline.repeats=2 have no use with mesh.stage=1",
    ),
    (
        {
            "mesh.stage": 1,
            "pipeline.vocabulary": "parallel",
            "pipeline.permute": "late",
            "pipeline.times": (1.0, 1.0, 1.0),
        },
        "pipeline.schedule=interleaved, pipeline.repeats=2, pipeline.vocabulary=parallel, "
        "pipeline.permute=late and "
        "pipeline.times=1.0,1.0,1.0 have no use with mesh.stage=1",
    ),
    (
        {**LATENT, "model.qk_norm": True},
        "model.qk_norm=true has no use with model.attention='mla'",
    ),
    (
        {"model.qk_norm_over": "projection"},
        "model.qk_norm_over=projection has no use with model.qk_norm=False",
    ),
    (
        {"model.activation_alpha": 1.0, "model.activation_limit": 5.0},
        "model.activation_alpha=1.0 and model.activation_limit=5.0 have no use with "
        "model.activation='swiglu'",
    ),
    (
        {"model.experts": 4, "model.shared_gate": True},
        "model.shared_gate=true has no use with model.shared_experts=0",
    ),
    (
        {"model.attention_kernel": "xla", "model.attention_backward": "fused"},
        "model.attention_backward=fused has no use with model.attention_kernel='xla'",
    ),
    (
        {"precision.fp8_gradients": "e4m3"},
        "precision.fp8_gradients=e4m3 has no use with precision.matmul='compute'",
    ),
    ({"parallel.context": "ring"}, "parallel.context=ring has no use with mesh.context=1"),
    (
        {"parallel.collective_matmul": "on", "mesh.model": 1},
        "parallel.collective_matmul=on has no use with mesh.model=1",
    ),
    ({"parallel.expert_nodes": 2}, "parallel.expert_nodes=2 has no use with mesh.expert=1"),
    ({"parallel.gather": "step"}, "parallel.gather=step has no use with parallel.zero=1"),
    (
        {"parallel.zero": 3, "mesh.data": 1},
        "parallel.zero=3 has no use with mesh.data=1 that 1 has not",
    ),
    (
        {"parallel.reduce": "microbatch", "mesh.data": 1},
        "parallel.reduce=microbatch has no use with mesh.data=1",
    ),
    (
        {"optimizer.outer_learning_rate": 1.0, "precision.outer": "int8", "mesh.replica": 2},
        "optimizer.outer_learning_rate=1.0 and precision.outer=int8 have no use with "
        "train.diloco_inner_steps=0, "
        "where replicas are not independent",
    ),
    (
        {"optimizer.decay_steps": 3},
        "optimizer.decay_steps=3 has no use with optimizer.schedule='cosine'",
    ),
    (
        {"optimizer.decay_steps": 3, "optimizer.schedule": "inverse_sqrt"},
        "optimizer.decay_steps=3 has no use with optimizer.schedule='inverse_sqrt'",
    ),
    (
        {"optimizer.final_fraction": 0.5, "optimizer.schedule": "inverse_sqrt"},
        "optimizer.final_fraction=0.5 has no use with optimizer.schedule='inverse_sqrt'",
    ),
    (
        {"optimizer.schedule": "1-sqrt"},
        "optimizer.schedule=1-sqrt has no use with optimizer.decay_steps=0, where the learning "
        "rate is constant",
    ),
    (
        {"optimizer.final_fraction": 0.5, "optimizer.schedule": "constant"},
        "optimizer.final_fraction=0.5 has no use with optimizer.schedule='constant' and "
        "optimizer.decay_steps=0",
    ),
    (
        {"model.shared_experts": 1, "model.capacity_factor": 1.5, "model.router": "sigmoid"},
        "model.shared_experts=1, model.router=sigmoid and model.capacity_factor=1.5 have no "
        "use with model.experts=0",
    ),
    (
        {
            "model.router_group_best": 1,
            "model.router_normalize": "never",
            "model.router_bias": False,
        },
        "model.router_normalize=never, model.router_bias=false and model.router_group_best=1 "
        "have no use with model.experts=0",
    ),
    (
        {
            "model.experts": 8,
            "mesh.expert": 2,
            "model.capacity_factor": 1.5,
            "model.expert_room": 2.0,
        },
        "model.expert_room=2.0 has no use with model.capacity_factor=1.5",
    ),
    (
        {"model.experts": 8, "model.expert_room": 2.0},
        "model.expert_room=2.0 has no use with mesh.expert=1, where each device has "
        "memory for all of its tokens",
    ),
    (
        {"model.experts": 8, "model.router_group_best": 1},
        "model.router_group_best=1 has no use with model.router_groups=1",
    ),
    (
        {"model.experts": 8, "model.router_bias": False, "model.balance_rate": 0.01},
        "model.balance_rate=0.01 has no use with model.router_bias=False",
    ),
    (
        {"model.latent_norm_epsilon": 1e-6},
        "model.latent_norm_epsilon=1e-06 has no use with model.attention='gqa'",
    ),
    (
        {"model.experts": 4, "model.expert_width": 64, "model.mlp_width": 32},
        "model.mlp_width=32 has no use with model.expert_width, where every layer has experts",
    ),
    (
        {"model.kv_rank": 8, "model.rope_head_dim": 3},
        "model.kv_rank=8 and model.rope_head_dim=3 have no use with model.attention='gqa'",
    ),
    (
        {"model.positions": "learned", "model.rotary_base": 500.0},
        "model.rotary_base=500.0 has no use with model.positions='learned'",
    ),
    (
        {"model.positions": "learned", **SCALED, "model.rope_scaling": "yarn"},
        "model.rope_scaling=yarn, model.rope_factor=4.0 and model.rope_original_length=32 have no "
        "use with model.positions='learned'",
    ),
    (
        {**LATENT, "model.rotary_dim": 4},
        "model.rotary_dim=4 has no use with model.attention='mla'",
    ),
    (
        SCALED,
        "model.rope_factor=4.0 and model.rope_original_length=32 have no use with "
        "model.rope_scaling='none'",
    ),
    (
        {**SCALED, "model.rope_scaling": "yarn", "model.rope_mscale": 1.0},
        "model.rope_mscale=1.0 has no use with model.rope_mscale_all_dim=0.0 and "
        "model.rope_attention_factor=0.0",
    ),
    (
        {**SCALED, "model.rope_scaling": "yarn", "model.rope_mscale_all_dim": 1.0},
        "model.rope_mscale_all_dim=1.0 has no use with model.attention='gqa', "
        "model.rope_mscale=0.0 and model.rope_attention_factor=0.0",
    ),
    (
        {"parallel.zero": 3, "parallel.ends": "sharded"},
        "parallel.ends=sharded has no use with parallel.zero=3, which shards all parameters over "
        "mesh.data",
    ),
    (
        {"model.max_positions": 64},
        "model.max_positions=64 has no use with model.positions='rotary'",
    ),
    ({"model.mtp_weight": 0.1}, "model.mtp_weight=0.1 has no use with model.mtp_depth=0"),
    (
        {"data.text_fields": ("a b", "c")},
        "data.text_fields='a b,c' has no use with data.source='stdlib'",
    ),
    (
        {"data.token_dtype": "uint32"},
        "data.token_dtype=uint32 has no use with data.source='stdlib'",
    ),
    (
        {"train.nonfinite_limit": 3},
        "train.nonfinite_limit=3 has no use with train.on_nonfinite='stop'",
    ),
    (
        {"train.on_nonfinite": "skip", "train.rollbacks": 1},
        "train.rollbacks=1 has no use with train.on_nonfinite='skip'",
    ),
    (
        {"train.on_nonfinite": "rollback", "train.spike_steps": 1},
        "train.spike_steps=1 has no use with train.spike_threshold=0",
    ),
    (
        {"data.validation_fraction": 0.0, "train.eval_batches": 3, "checkpoint.keep_best": 2},
        "train.eval_batches=3 and checkpoint.keep_best=2 have no use with "
        "data.validation_fraction=0",
    ),
    *(
        (
            {"checkpoint.keep_best": 2, "checkpoint.every": every, "train.eval_every": evaluate},
            f"checkpoint.keep_best=2 has no use with checkpoint.every={every} and "
            f"train.eval_every={evaluate}: no step before the last is saved and evaluated",
        )
        for every, evaluate in ((20, 0), (0, 20), (9, 25))
    ),
    (
        {"checkpoint.keep_every": 7, "checkpoint.every": 20},
        "checkpoint.keep_every=7 has no use with checkpoint.every=20: no step before the last is a "
        "multiple of both",
    ),
    (
        {
            "train.steps": 7,
            "train.eval_every": 7,
            "checkpoint.every": 500,
            "checkpoint.local_every": 9,
            "checkpoint.local": "/dev/shm/jaxtrain",
            "train.hash_every": 8,
        },
        "train.eval_every=7, checkpoint.every=500, checkpoint.local_every=9 and train.hash_every=8 "
        "have no use with train.steps=7",
    ),
    (
        {f"mesh.{axis}": 1 for axis in AXES}
        | {
            "train.hash_every": 1,
            "pipeline.schedule": "1f1b",
            "pipeline.repeats": 0,
        },
        "train.hash_every=1 has no use with one device, which has the only copy of each parameter",
    ),
    ({"data.bad_records": "skip"}, "data.bad_records=skip has no use with data.source='stdlib'"),
    (
        {"data.source": __file__, "data.sources": ("a=stdlib",)},
        f"data.source={__file__} has no use with data.sources",
    ),
    (
        {"data.token_dtype": "uint32", "data.sources": ("a=stdlib", "b=b.txt")},
        "data.token_dtype=uint32 has no use with data.sources",
    ),
    (
        {"data.sources": ("a=stdlib", "a.exhausted=leave")},
        "data.sources: a.exhausted=leave has no use with its epochs=0, without end",
    ),
    (
        {"data.filter": "mine:keep", "data.source": "ids.bin"},
        "data.filter=mine:keep has no use with data.source='ids.bin'",
    ),
    (
        {"data.duplicates": "near", "data.source": __file__},
        f"data.duplicates=near has no use with data.source={__file__!r}, which has no two texts",
    ),
    (
        {"pipeline.layers_per_op": 2},
        "pipeline.layers_per_op=2 has no use where a chunk has 2 layers at most",
    ),
    (
        {"train.sample_prompt": "it's "},
        "train.sample_prompt='it'\"'\"'s ' has no use with train.sample_tokens=0",
    ),
    (
        {"metrics.project": "small"},
        "metrics.project=small has no use without metrics.trackers",
    ),
]
