"""The rules between settings of a filled config, in the order in which they are checked: a later
rule may rely on the earlier ones, and the first broken one is reported. checks.py has the rules
that come before a config is filled in, and those of devices and checkpoints. Standard library
only."""

from jaxtrain.config.rules import (
    mesh_rules,
    mixture_rules,
    model_rules,
    phase_rules,
    pipeline_rules,
    run_rules,
)
from jaxtrain.config.rules.rules import SettingsRule

RULES: tuple[SettingsRule, ...] = (
    run_rules.own_code_exists,
    mixture_rules.items_are_known,
    phase_rules.phases_are_known,
    model_rules.latent_attention_is_complete,
    model_rules.heads_divide,
    model_rules.rotary_scaling_is_complete,
    model_rules.experts_have_capacity,
    model_rules.one_norm_is_shared,
    model_rules.mup_draws_all_values,
    model_rules.router_groups_divide,
    run_rules.sequence_fits,
    run_rules.data_has_fields,
    run_rules.own_loss_fits,
    run_rules.compiler_options_have_names,
    run_rules.products_are_built,
    pipeline_rules.pipeline_fits,
    pipeline_rules.several_steps_update_alike,
    pipeline_rules.saved_values_exist,
    pipeline_rules.layers_fill_chunks,
    pipeline_rules.chunks_have_layers,
    run_rules.steps_suffice,
    run_rules.places_are_folders,
    run_rules.weights_have_one_origin,
    run_rules.average_fits,
    run_rules.offload_directory_is_local,
    mesh_rules.blocks_divide,
    mesh_rules.context_axis_divides,
    mesh_rules.expert_axis_has_experts,
    mesh_rules.expert_axis_divides,
    mesh_rules.expert_nodes_divide,
    mesh_rules.model_axis_divides,
    mesh_rules.products_over_model_are_built,
    mesh_rules.reductions_fit,
    mesh_rules.batch_divides,
)
# Rules about the products of this trainer, which bind no other framework.
OF_OUR_PRODUCTS: tuple[SettingsRule, ...] = (
    run_rules.products_are_built,
    mesh_rules.blocks_divide,
)
