"""The steps of a run after which something is due. No jax."""

import dataclasses
from collections.abc import Callable

from jaxtrain.config import CheckpointConfig, TrainConfig


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Intervals in steps, which are counted from 1. After the last step everything is due except
    local saves and comparisons; with an interval of 0, only after that step."""

    last: int
    save_every: int
    evaluate_every: int
    log_every: int
    exchange_every: int  # 0: replicas are not independent, and never exchange
    save_locally_every: int = 0  # 0: never
    compare_every: int = 0  # 0: copies of parameters are never compared
    of_all: int = 0  # the last step that any start of the run takes

    @classmethod
    def of(cls, train: TrainConfig, checkpoint: CheckpointConfig, log_every: int) -> "Intervals":
        """The intervals that the settings have. log_every: metrics.log_every."""
        return cls(
            train.last_step,
            save_every=checkpoint.every,
            evaluate_every=train.eval_every,
            log_every=log_every,
            exchange_every=train.diloco_inner_steps,
            save_locally_every=checkpoint.local_every,
            compare_every=train.hash_every,
            of_all=train.steps,
        )

    def saves(self, at: int) -> bool:
        return self._due(at, self.save_every)

    def saves_locally(self, at: int) -> bool:
        """True if each machine saves for itself. Never after the last step, whose persistent save
        is waited for."""
        return at != self.last and self.save_locally_every > 0 and at % self.save_locally_every == 0

    def evaluates(self, at: int) -> bool:
        return self._due(at, self.evaluate_every)

    def exchanges(self, at: int) -> bool:
        return self.exchange_every > 0 and (at == self.of_all or at % self.exchange_every == 0)

    def steps_until(self, at: int, most: int, stops: Callable[[int], bool]) -> int:
        """The number of steps, at most `most`, after step `at` until something has to be done
        between two steps; logging has not. stops(step): something else has to be done after it"""
        for step in range(at + 1, at + most):
            between = self.saves, self.saves_locally, self.evaluates, self.compares, stops
            if step == self.last or any(due(step) for due in between):
                return step - at
        return min(most, self.last - at)

    def logs(self, at: int) -> bool:
        return at == 1 or self._due(at, self.log_every)

    def synchronizes(self, at: int) -> bool:
        """True if processes may ask each other something after this step. Independent replicas do
        not wait for each other between exchanges and logged steps."""
        return self.exchange_every == 0 or self.exchanges(at) or self._due(at, self.log_every)

    def compares(self, at: int) -> bool:
        """True if copies of parameters are compared. Independent replicas compare them at the first
        exchange at or after the step at which the comparison is due."""
        if not self.compare_every:
            return False
        if not self.exchange_every:
            return at % self.compare_every == 0
        last_exchange = (at - 1) // self.exchange_every * self.exchange_every
        is_due = at // self.compare_every > last_exchange // self.compare_every
        return self.exchanges(at) and is_due

    def _due(self, at: int, every: int) -> bool:
        return at == self.last or (every > 0 and at % every == 0)
