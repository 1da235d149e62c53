"""Checks of a config, and the nearest flags that work.

    config, environment ─► the first broken rule ─► its fixes, the best first ─► the first after
                           which every rule holds

`check` raises for the first broken rule. Rules of a single setting come first, then those between
settings, then those of the devices, the checkpoint and the rest of the environment. If no fix of
the rule is enough, it is combined with fixes of the rules that are broken next, depth first and the
fewest settings first; as the last resort settings go back to the recipe's values. The search is
bounded by the number of configs that it tries, never by time, so that all processes suggest the
same. No jax.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError, MeshedConfig, StoredConfig
from jaxtrain.config.rules import kind_rules, mesh_rules, model_rules, phase_rules, resume
from jaxtrain.config.rules.all_rules import OF_OUR_PRODUCTS, RULES
from jaxtrain.config.rules.field_rules import TRAINED, field_violation
from jaxtrain.config.rules.kind_rules import violations
from jaxtrain.config.rules.rules import SettingChanges, SettingsRule, Violation, groups_of

MOST_CONFIGS = 4_000  # looked at, some 50 µs each
MOST_FIXES = 24  # of a rule
MOST_COMBINED = 7  # fixes, where no config is known to work
# Settings of `model` and `data` that do not decide what is trained, and those that no other value
# can stand for.
UNTRAINED = ("model.attention_", "model.loss_chunk", "data.cache", "data.prefetch")
NAMED = ("data.source", "data.tokenizer", "train.init_from", "model.block", "model.mixer")
# The rules of a model as it is read, with all of its kinds of layers. They come first, for the
# others may rely on them.
OF_MODELS = (
    kind_rules.kinds_are_known,
    model_rules.head_size_is_whole,
    model_rules.dense_layers_come_before_experts,
    model_rules.biases_have_parts,
)


@dataclasses.dataclass(frozen=True)
class Environment:
    """The surroundings against which a config is checked, besides its own rules. What is unknown is
    not checked.

    devices:    the number of devices; platform: their platform by jax's name
    recipe:     the config before the command's flags, whose values are tried as fixes
    checkpoint: the config of the checkpoint that is resumed
    position:   the number of its next batch
    rules:      further rules, for configs that keep all others (pipeline/run_checks.py)
    is_ours:    this trainer runs the config, and no other framework whose step is planned
    """

    devices: int | None = None
    platform: str = ""
    recipe: Config = dataclasses.field(default_factory=Config)
    checkpoint: StoredConfig | None = None
    position: int = 0
    rules: tuple[SettingsRule, ...] = ()
    is_ours: bool = True


UNKNOWN = Environment()


def check(config: Config, environment: Environment = UNKNOWN) -> None:
    """Raises ConfigError for the first broken rule."""
    if error := error_of(config, environment):
        raise error


def check_devices(config: Config, device_count: int, platform: str = "gpu") -> MeshedConfig:
    """The config on its mesh of this number of devices, every rule checked with it.

    platform: of the devices, as jax names it. Raises ConfigError if the mesh does not use all
    the devices, the batch does not divide over them, or they have no such kernel.
    """
    check(config, Environment(device_count, platform))
    return mesh_rules.on_mesh(config, device_count)


def check_resume(
    stored: StoredConfig, config: Config, environment: Environment = UNKNOWN, position: int = 0
) -> None:
    """Raises ConfigError naming the first field in which a config may not differ from the `stored`
    one of the checkpoint that it resumes. position: the number of the checkpoint's next batch"""
    environment = dataclasses.replace(environment, checkpoint=stored, position=position)
    # tables take long, and a run's have been made
    if first_violation(config, dataclasses.replace(environment, rules=())):
        check(config, environment)


def error_of(config: Config, environment: Environment = UNKNOWN) -> ConfigError | None:
    """The error for the first broken rule; its first fix are the settings after which every rule
    holds. None if every rule holds."""
    violation = first_violation(config, environment)
    return _Search(config, environment).error(violation) if violation else None


def first_violation(config: Config, environment: Environment = UNKNOWN) -> Violation | None:
    """The first broken rule of a config; None if every rule holds."""
    return next(_violations(config, environment, cfg.fields()), None)


def _violations(
    config: Config, environment: Environment, paths: Iterable[str]
) -> Iterator[Violation]:
    """The violations of a config, in order. Only the first is certain, because later rules rely on
    earlier ones. paths: the settings whose own values are checked."""
    for path in paths:
        value, of_recipe = cfg.get(config, path), cfg.get(environment.recipe, path)
        if violation := field_violation(path, value, of_recipe):
            yield violation
    yield from mesh_rules.axes_have_sizes(config.mesh)
    for of_model in OF_MODELS:
        yield from of_model(config.model)
    sized = mesh_rules.filled(config, environment.devices)
    complete = sized.fill()
    rules = [rule for rule in RULES if environment.is_ours or rule not in OF_OUR_PRODUCTS]
    for rule in rules:
        yield from violations(rule, complete)
    # Of the environment's rules those of layers read the sizes of a batch; tables do not.
    of_layers = [rule for rule in environment.rules if {"model", "data"} <= {*groups_of(rule)}]
    yield from phase_rules.of_spans([*rules, *of_layers], complete)
    if environment.devices is not None:
        yield from mesh_rules.mesh_uses_devices(sized.mesh, environment.devices)
    on_platform = lambda model: model_rules.kernel_is_of_platform(model, environment.platform)
    yield from kind_rules.of_kinds(on_platform, config.model)
    if environment.checkpoint:
        yield from resume.violations(complete, environment.checkpoint, environment.position)
    for rule in environment.rules:
        yield from violations(rule, complete)


def model_violation(config: Config) -> Violation | None:
    """The first broken rule of a config's model, whatever its corpus and its devices are."""
    for path in cfg.fields():
        if path.startswith("model.") and (
            violation := field_violation(path, cfg.get(config, path), cfg.fields()[path].default)
        ):
            return violation
    for rule in OF_MODELS:
        if violation := next(rule(config.model), None):
            return violation
    complete = config.fill()
    of_models = (rule for rule in RULES if groups_of(rule)[0] == "model")
    broken = (violation for rule in of_models for violation in violations(rule, complete))
    return next((each for each in broken if each.field.startswith("model.")), None)


# --- suggestions ----------------------------------------------------------------------------------


class _Search:
    """The search for changes of a config after which every rule holds in its environment.

    lenient: rules between settings that no flag mends are passed over, and said on their own
    """

    def __init__(self, config: Config, environment: Environment, lenient: bool = False):
        self.config, self.environment, self.lenient = config, environment, lenient
        self.walked = 0  # configs
        self.kept: tuple[str, ...] = ()  # beginnings of the settings that no fix may change
        self._known: dict[str, tuple[SettingChanges, ...] | None] = {}
        self._wrong = {
            path: wrong
            for path in cfg.fields()
            for of_recipe in [cfg.get(environment.recipe, path)]
            if (wrong := field_violation(path, cfg.get(config, path), of_recipe))
        }

    def error(self, violation: Violation) -> ConfigError:
        """The error for a broken rule, with changes after which every rule holds, or every one that
        any flag mends."""
        field, checkpoint = violation.field, self.environment.checkpoint
        changes = self.fewest_changes()
        if not changes and violation.fixes:
            of_recipe = {
                path: cfg.get(self.environment.recipe, path)
                for path, wrong in self._wrong.items()
                if not wrong.fixes
            }
            changes = _Search(
                cfg.replace(self.config, of_recipe), self.environment, lenient=True
            ).fewest_changes()
        order = [field, *cfg.fields()]
        changes = {path: changes[path] for path in sorted(changes, key=order.index)}
        text = cfg.suggestion(changes, self.other_values(violation, changes))
        if checkpoint and (
            violation.rule.startswith(resume.CANNOT) or (violation.fixes and not changes)
        ):
            text = f"{text} (or another --workdir)" if changes else self._elsewhere()
        return ConfigError(field, cfg.get(self.config, field), violation.rule, text, [changes])

    def _elsewhere(self) -> str:
        """Where the config works if no change of it does: with fewer devices, or another folder."""
        most = self.environment.devices or 1
        numbers = range(most - 1, max(0, most - 1 - MOST_FIXES), -1)
        fewer = (dataclasses.replace(self.environment, devices=number) for number in numbers)
        if works := next((e for e in fewer if not first_violation(self.config, e)), None):
            is_cpu = works.platform == "cpu"
            return f"--cpu_devices={works.devices}" if is_cpu else f"{works.devices} devices"
        return "another --workdir"

    def fewest_changes(self) -> SettingChanges:
        """The fewest fixes of broken rules that work together, or the settings that go back to
        another config, where these are only one, or fewer by more than one. Empty where nothing
        works.

        Fixes that leave alone what is trained have precedence, up to two of them, and nothing is
        suggested in place of a published model's settings."""
        self.kept = TRAINED
        if changes := self._walk({}, 1) or self._walk({}, 2):
            return self._needed(changes)
        self.kept = ("model.",) if self.config.train.init_from else ()
        self._known.clear()
        if changes := self._walk({}, 1):
            return changes
        restored = (self._restored(other) for other in _known_to_work(self.environment))
        last_resort = min(filter(None, restored), key=len, default={})
        if len(last_resort) == 1:
            return last_resort
        for most in range(2, (len(last_resort) or MOST_COMBINED) + 2):
            if changes := self._walk({}, most):
                return self._needed(changes)
        return last_resort

    def other_values(self, violation: Violation, changes: SettingChanges) -> list:
        """Further values that work for the one setting that is changed, as many as the rule shows;
        none where several are changed or the rule is about another one."""
        field = violation.field
        if list(changes) != [field] or isinstance(changes[field], tuple):
            return []
        fixes = itertools.islice(violation.fixes, MOST_FIXES)
        offered = dict.fromkeys(fix[field] for fix in fixes if list(fix) == [field])
        others = (
            value
            for value in offered
            if value not in (changes[field], -1) and self.passes({field: value})
        )
        values = [*itertools.islice(others, violation.show - 1)]
        return sorted(values) if type(changes[field]) is int else values

    def passes(self, changes: SettingChanges) -> bool:
        """True if every rule holds after these changes."""
        return self._fixes(changes) is None

    def _walk(self, changes: SettingChanges, most: int) -> SettingChanges | None:
        """Changes that work, these and at most so many fixes beyond them: the first that a
        depth-first walk over the fixes of broken rules comes to."""
        fixes = self._fixes(changes)
        if fixes is None:
            return changes
        for fix in fixes if most else ():
            if not changes.keys() & fix.keys():
                if self.walked >= MOST_CONFIGS:
                    return None
                self.walked += 1
                if result := self._walk(changes | fix, most - 1):
                    return result
        return None

    def _fixes(self, changes: SettingChanges) -> tuple[SettingChanges, ...] | None:
        """The fixes of the first rule that is broken after these changes; None if every rule
        holds."""
        key = repr(sorted(changes.items()))
        if key not in self._known:
            config = cfg.replace(self.config, changes)
            paths = [path for path in cfg.fields() if path in changes or path in self._wrong]
            violation = next(
                (
                    each
                    for each in _violations(config, self.environment, paths)
                    if not self.lenient or each.fixes or each.field in self._wrong
                ),
                None,
            )
            fixes = itertools.islice(violation.fixes, MOST_FIXES) if violation else ()
            kept = lambda path: path.startswith(self.kept) and not path.startswith(UNTRAINED)
            allowed = tuple(fix for fix in fixes if not any(map(kept, fix)))
            self._known[key] = allowed if violation else None
        return self._known[key]

    def _restored(self, other: Config) -> SettingChanges | None:
        """The settings in which the config has to become like one that works, none without need;
        None if that one does not work here."""
        pairs = {path: (cfg.get(self.config, path), cfg.get(other, path)) for path in cfg.fields()}
        changes = {
            path: new
            for path, (old, new) in pairs.items()
            if repr(old) != repr(new) and not path.startswith((*NAMED, *self.kept))
            if not (path in self._wrong and path.startswith(TRAINED))
        }
        return self._needed(changes) if self.passes(changes) else None

    def _needed(self, changes: SettingChanges) -> SettingChanges:
        """Changes that work without those that are not needed; the model's are dropped first."""
        for path in sorted(changes, key=[*cfg.fields()].index):
            fewer = {other: value for other, value in changes.items() if other != path}
            if self.passes(fewer):
                return self._needed(fewer)
        return changes


def _known_to_work(environment: Environment) -> Iterator[Config]:
    """Configs that nearly always work: the checkpoint's, the recipe, the defaults, and each of them
    with data parallelism alone."""
    for config in (environment.checkpoint, environment.recipe, Config()):
        if config is None:
            continue
        yield config
        shards = environment.devices or 1
        plain = dataclasses.replace(
            config.as_read(),
            mesh=cfg.MeshConfig(),
            parallel=cfg.ParallelConfig(),
            pipeline=cfg.PipelineConfig(),
        )
        batch = max(1, config.data.batch_size // shards) * shards
        yield cfg.replace(plain, {"data.batch_size": batch, "train.diloco_inner_steps": 0})
