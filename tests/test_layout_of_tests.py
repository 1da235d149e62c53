"""Tests stand where one looks: a module ROOM/MODULE.py is tested in tests/ROOM/test_MODULE.py, the
modules ROOM/FOLDER/*.py in the same place or in tests/ROOM/test_FOLDER.py, and others in the file
that GROUPED names.

Each other file of a room's tests is about several of its modules, and its docstring says what. The
tests of whole commands and scripts stand beside the rooms' folders; benchmarks/, by_hand/,
chaos/, extending/ and launch/ test scripts, fuzzers, kills, docs/extending.md and the templates of
scripts/launch.
"""

import ast

from support import ROOMS, ROOT

TESTS = ROOT / "tests"
# module → its tests, where they are in a file of another name
GROUPED = {
    "__main__.py": "test_package.py",
    "checkpoint/__main__.py": "checkpoint/test_command.py",
    "checkpoint/resuming.py": "checkpoint/test_damage.py",
    "checkpoint/local_restore.py": "checkpoint/test_local.py",
    "checkpoint/manifest.py": "checkpoint/test_steps.py",
    "checkpoint/reading.py": "checkpoint/test_command.py",
    "checkpoint/storage.py": "checkpoint/test_damage.py",
    "checkpoint/subject.py": "checkpoint/test_command.py",
    "generate_command.py": "test_generate.py",
    "train_command.py": "test_train.py",
    "config/addresses.py": "checkpoint/test_stores.py",
    "config/errors.py": "config/test_flags.py",
    "config/rules/field_rules.py": "config/test_groups.py",
    "config/rules/phase_rules.py": "config/test_phases.py",
    "config/rules/uses.py": "config/test_unused.py",
    **{
        f"config/rules/{name}.py": "config/test_checks.py"
        for name in (
            "all_rules",
            "kind_rules",
            "model_rules",
            "pipeline_rules",
            "rules",
            "run_rules",
        )
    },
    "config/saved_values.py": "training/test_saved_values.py",
    "devices/state_stream.py": "training/test_streamed_update.py",
    "config/splash_backward.py": "config/test_kernels.py",
    "planner/layer/collective_time.py": "planner/step/test_step_counts.py",
    "planner/step/layer_time.py": "planner/step/test_step_time.py",
    "planner/layer/settings.py": "planner/step/test_step_model.py",
    "planner/step/time_breakdown.py": "planner/step/test_step_time.py",
    "pipeline/prepared_run.py": "phases/test_prepare.py",
    "pipeline/step_picture.py": "experiments/test_page.py",
    "planner/for_training.py": "test_imports.py",
    "planner/step/outside_layers.py": "planner/step/test_step_time.py",
    "planner/step/memory.py": "planner/step/test_memory_compiled.py",
    "planner/step/planned_op_times.py": "pipeline/test_setup.py",
    "planner/layer/layer.py": "planner/layer/test_layer_trace.py",
    "data/errors.py": "data/test_hub.py",
    "data/__main__.py": "data/test_command.py",
    "data/report.py": "data/test_command.py",
    "data/corpus.py": "data/test_prepare.py",
    "data/reading/extents.py": "data/test_parts.py",
    "data/reading/bad_records.py": "data/test_records.py",
    "data/reading/json_text.py": "data/test_records.py",
    "data/preparing/corpus_writer.py": "data/test_prepare.py",
    "data/reading/joined.py": "data/test_token_files.py",
    "data/reading/megatron_index.py": "data/test_token_files.py",
    "data/preparing/index_tokens.py": "data/test_token_files.py",
    "data/preparing/adopt.py": "data/test_stores.py",
    "devices/cluster_environment.py": "devices/test_cluster.py",
    "devices/startup.py": "test_cli.py",
    "hf/entries.py": "hf/test_model_config.py",
    "hf/layer_types.py": "hf/test_model_config.py",
    "hf/fields.py": "hf/test_model_config.py",
    "hf/source_files.py": "test_convert.py",
    "hf/rope_parameters.py": "hf/test_model_config.py",
    "hf/tensor_rules.py": "hf/test_families.py",
    "loop.py": "test_train.py",
    "parallel/jaxprs.py": "parallel/test_pinned.py",
    "parallel/random_bits.py": "parallel/test_dropout.py",
    "parallel/attention/flash.py": "parallel/test_blockwise.py",
    "parallel/replicas.py": "training/test_diloco.py",
    "parallel/attention/ring.py": "parallel/test_context.py",
    "parallel/attention/splash_fused.py": "parallel/test_splash.py",
    "phases/run_context.py": "test_train.py",
    "phases/run_end.py": "test_train.py",
    "phases/run_files.py": "test_train.py",
    "phases/run_state.py": "test_forks.py",
    "pipeline/op_times.py": "pipeline/test_setup.py",
    "pipeline/schedule_file.py": "pipeline/test_setup.py",
    "plan.py": "planner/command/test_command.py",
    "planner/command/main.py": "planner/command/test_command.py",
    "planner/search/explain.py": "planner/command/test_command.py",
    "planner/search/layout_flag.py": "planner/command/test_command.py",
    "runtime/updates.py": "training/test_several_steps.py",
    "runtime/batch.py": "runtime/test_predictions.py",
    "runtime/embedding_and_head.py": "runtime/test_predictions.py",
    "runtime/runtime.py": "runtime/test_program.py",
    "runtime/layers/saved_bytes.py": "planner/step/test_saved.py",
    "runtime/tick_ops.py": "runtime/test_tick.py",
    "schedule/__main__.py": "test_show_schedule.py",
    "schedule_flags.py": "test_show_schedule.py",
    "schedule/cell_grid.py": "schedule/test_table.py",
    "experiments/followers.py": "experiments/test_track.py",
    "schedule/by_name.py": "schedule/test_orders.py",
    "schedule/clocks/coupled.py": "schedule/test_simulate.py",
    "schedule/clocks/events.py": "schedule/test_simulate.py",
    "schedule/clocks/independent.py": "schedule/test_simulate.py",
    "schedule/clocks/times.py": "schedule/test_simulate.py",
    "schedule/files/table_lines.py": "schedule/test_table_csv.py",
    "schedule/files/csv_text.py": "schedule/test_table_csv.py",
    "schedule/packing.py": "schedule/test_orders.py",
    "schedule/table_spec.py": "schedule/test_orders.py",
    "training/update/balance.py": "training/test_experts.py",
    "training/stored_op_times.py": "training/test_measured_op_times.py",
    "training/initial_values.py": "training/test_state.py",
    "training/parameter_layout.py": "training/test_state.py",
    "training/compiled_step.py": "training/test_streamed_update.py",
    "training/one_step.py": "training/test_variants.py",
    "training/step.py": "training/test_variants.py",
    "runtime/layers/equations.py": "runtime/test_backward_split.py",
}
OTHER_FOLDERS = {"benchmarks", "by_hand", "chaos", "extending", "golden", "launch", "support"}
MODULES = {
    str(path.relative_to(ROOT / "jaxtrain")): path
    for path in (ROOT / "jaxtrain").rglob("*.py")
    if path.name != "__init__.py"
}


def own_tests(module: str) -> str:
    """The path of a module's tests below tests/, if it has a file of its own."""
    folder, _, name = module.rpartition("/")
    if "/" in folder and folder not in ROOMS:
        room, _, group = folder.partition("/")
        alone = f"{room}/test_{name}"
        return alone if (TESTS / alone).exists() else f"{room}/test_{group}.py"
    return f"{folder}/test_{name}" if folder else f"test_{name}"


def test_every_module_has_its_tests():
    nowhere = [
        module
        for module in MODULES
        if not (TESTS / own_tests(module)).exists() and module not in GROUPED
    ]
    assert not nowhere, f"no tests/…/test_MODULE.py and not in GROUPED: {sorted(nowhere)}"


def test_the_groups_are_needed():
    assert not (gone := GROUPED.keys() - MODULES.keys()), f"no such modules: {gone}"
    missing = {file for file in GROUPED.values() if not (TESTS / file).is_file()}
    assert not missing, f"no such files of tests: {missing}"
    own = [module for module in GROUPED if (TESTS / own_tests(module)).exists()]
    assert not own, f"these have a file of their own: {own}"


def test_the_folders_of_tests_are_the_rooms():
    folders = {str(path.parent.relative_to(TESTS)) for path in TESTS.glob("*/**/*.py")}
    assert folders == {*ROOMS, *OTHER_FOLDERS}


def test_every_file_of_tests_says_what_it_tests():
    for path in TESTS.rglob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, f"{path.relative_to(ROOT)} has no docstring"
