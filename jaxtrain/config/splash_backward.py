"""The kernels of splash's backward: one fused kernel, or two. Standard library only.

    two kernels   jax's: one for the gradient of queries, one for those of keys and values. Both
                  compute the scores and their gradients: seven products in all
    fused         parallel/attention/splash_fused.py: one kernel with five products. It goes through
                  the keys for each block of queries, and sums the gradients of all these keys and
                  values in vector memory, float32

SUM_BYTES of vector memory have the sums of some thousand keys. Longer sequences take several calls,
each with a part of the keys; the gradient of queries goes through memory from one to the next in
float32. `auto` is fused wherever the sums of a block of keys have room.
"""

import dataclasses

STEP = 128  # tokens: a TPU's registers have so many lanes, and blocks are multiples of it
MOST = 1024  # tokens of a block
WINDOW_WORK = 1.3  # scores of the blocks of a window over those of the window, at most
SUM_BYTES = 8 << 20
FUSED, TWO_KERNELS = "fused", "two_kernels"


def block_size(tokens: int, most: int = MOST) -> int:
    """The largest multiple of STEP that divides so many tokens and is no more than `most`; 0 if
    none does."""
    return next(
        (n for n in range(min(tokens, most) // STEP * STEP, 0, -STEP) if tokens % n == 0), 0
    )


def window_block_size(tokens: int, window: int, most: int = MOST) -> int:
    """The largest multiple of STEP that divides so many tokens, is no more than `most` or half of
    MOST (that of all kernels), and with which blocks have at most WINDOW_WORK times the scores of a
    window; STEP if none does."""
    most = min(tokens, most, MOST // 2)
    sizes = (n for n in range(most // STEP * STEP, 0, -STEP) if tokens % n == 0)
    return next((n for n in sizes if window_steps(window, n) * n <= WINDOW_WORK * window), STEP)


def window_steps(window: int, block: int) -> int:
    """The number of blocks of keys that a block of queries meets in a window; of both sizes."""
    return -(-(window - 1) // block) + 1


def filled_up(queries: int, keys: int, window: int) -> int:
    """The number of keys, with those that fill up the first block: queries are the last keys."""
    block = window_block_size(queries, window)
    return queries + -(-(keys - queries) // block) * block


@dataclasses.dataclass(frozen=True)
class SplashBackward:
    """The backward of one attention on a device.

    kernels:    FUSED or TWO_KERNELS
    calls:      calls of the fused kernel, each with as many keys; 0: it takes no block of keys
    call_keys:  the keys of a call
    """

    kernels: str
    calls: int = 0
    call_keys: int = 0

    @property
    def products(self) -> int:
        """The number of products of queries with keys, or of what has their sizes."""
        return 5 if self.kernels == FUSED else 7

    def words(self, wanted: str) -> str:
        """The choice and its reason as text. wanted: model.attention_backward"""
        asked = f" (model.attention_backward={wanted})" if wanted != "auto" else ""
        sums = f"the gradients' sums of {{}} keys {{}} in {SUM_BYTES >> 20} MiB of vector memory"
        if self.kernels == FUSED:
            calls = f", in {self.calls} calls" * (self.calls > 1)
            fit = sums.format(f"{self.call_keys:,}", "fit")
            return f"one fused kernel of {self.products} products{calls}{asked}: {fit}"
        why = "" if asked else f": {sums.format('a block of', 'do not fit')}"
        return f"two kernels of {self.products} products{asked}{why}"


def splash_backward(wanted: str, keys: int, key_size: int, value_size: int) -> SplashBackward:
    """The backward of splash for so many keys of a sequence, and sizes of a head.

    wanted: model.attention_backward
    """
    block = block_size(keys) or STEP
    most = SUM_BYTES // (4 * (key_size + value_size))
    parts = (n for n in range(1, keys // block + 1) if keys % (n * block) == 0)
    calls = next((n for n in parts if keys // n <= most), 0)
    if wanted == TWO_KERNELS or not calls:
        return SplashBackward(TWO_KERNELS)
    return SplashBackward(FUSED, calls, keys // calls)
