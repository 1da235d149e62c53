"""After which steps of a run what is due. No jax."""

import dataclasses

from jaxtrain.config import Config


@dataclasses.dataclass(frozen=True)
class Calendar:
    """What is due after step `at`, counted from 1. After the last step everything is; an interval
    of 0 means: then alone."""

    last: int
    save_every: int
    evaluate_every: int
    log_every: int
    exchange_every: int  # 0: replicas are not independent, and never exchange
    save_locally_every: int = 0  # 0: never
    compare_every: int = 0  # 0: copies of parameters are never compared

    @classmethod
    def of(cls, config: Config) -> "Calendar":
        train, saves = config.train, config.checkpoint
        return cls(
            train.steps,
            saves.every,
            train.eval_every,
            config.metrics.log_every,
            train.diloco_inner_steps,
            saves.local_every,
            train.hash_every,
        )

    def is_last(self, at: int) -> bool:
        return at == self.last

    def saves(self, at: int) -> bool:
        return self._due(at, self.save_every)

    def saves_locally(self, at: int) -> bool:
        """Whether each machine saves for itself. Not after the last step, which everything waits
        for to be saved for good."""
        return at != self.last and self.save_locally_every > 0 and at % self.save_locally_every == 0

    def evaluates(self, at: int) -> bool:
        return self._due(at, self.evaluate_every)

    def exchanges(self, at: int) -> bool:
        return self.exchange_every > 0 and self._due(at, self.exchange_every)

    def logs(self, at: int) -> bool:
        return at == 1 or self._due(at, self.log_every)

    def meets(self, at: int) -> bool:
        """Whether processes may ask each other something: independent replicas do not wait for each
        other in between."""
        return self.exchange_every == 0 or self.exchanges(at) or self._due(at, self.log_every)

    def compares(self, at: int) -> bool:
        """Whether copies of parameters are compared; those of independent replicas at the first
        exchange that is not before it is due."""
        if not self.compare_every:
            return False
        if not self.exchange_every:
            return at % self.compare_every == 0
        return (
            self.exchanges(at)
            and at // self.compare_every
            > (at - 1) // self.exchange_every * self.exchange_every // self.compare_every
        )

    def _due(self, at: int, every: int) -> bool:
        return at == self.last or (every > 0 and at % every == 0)
